#include "group/bootstrap_link.hpp"

#include <utility>

#include "base/callback_thread.hpp"
#include "group/mpi_library.hpp"

namespace ferry {

namespace {

// Memory of one gather. The transport owns it too, and may still use it after the link has given up.
struct Buffers {
  Buffers(std::vector<std::byte> given, int ranks)
      : mine(std::move(given)), all(mine.size() * static_cast<std::size_t>(ranks)) {}

  std::vector<std::byte> mine, all;
};

class FunctionLink : public BootstrapLink {
 public:
  explicit FunctionLink(std::shared_ptr<const Bootstrap> bootstrap) : bootstrap_(std::move(bootstrap)) {}

  std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                    const std::function<void()>& check) override {
    const auto buffers = std::make_shared<Buffers>(std::move(mine), bootstrap_->ranks);
    thread_.run(
        "Bootstrap::all_gather",
        [bootstrap = bootstrap_, buffers] {
          bootstrap->all_gather(buffers->mine.data(), buffers->all.data(), buffers->mine.size());
        },
        check);
    return std::move(buffers->all);
  }

  void barrier(const std::function<void()>& check) override {
    thread_.run("Bootstrap::barrier", [bootstrap = bootstrap_] { bootstrap->barrier(); }, check);
  }

 private:
  std::shared_ptr<const Bootstrap> bootstrap_;  // shared with abandoned calls
  CallbackThread thread_;
};

class MpiLink : public BootstrapLink {
 public:
  MpiLink() { open_mpi(); }

  std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                    const std::function<void()>& check) override {
    const auto buffers = std::make_shared<Buffers>(std::move(mine), open_mpi().ranks);
    const auto start = [&](ferry_mpi_operation** operation, char* message) {
      return open_mpi().start_all_gather(buffers->mine.data(), buffers->all.data(), buffers->mine.size(),
                                         operation, message);
    };
    try {
      run_mpi_operation(start, check);
    } catch (...) {
      keep_forever(buffers);
      throw;
    }
    return std::move(buffers->all);
  }

  void barrier(const std::function<void()>& check) override { all_gather({}, check); }
};

}  // namespace

std::unique_ptr<BootstrapLink> link_by_functions(std::shared_ptr<const Bootstrap> bootstrap) {
  return std::make_unique<FunctionLink>(std::move(bootstrap));
}

std::unique_ptr<BootstrapLink> link_by_mpi() {
  return std::make_unique<MpiLink>();
}

}  // namespace ferry
