#include "group/bootstrap_link.hpp"

#include <utility>

#include "base/callback_thread.hpp"

namespace ferry {

namespace {

class FunctionLink : public BootstrapLink {
 public:
  explicit FunctionLink(const Bootstrap& bootstrap) : bootstrap_(bootstrap) {}

  std::vector<std::byte> all_gather(std::vector<std::byte> mine,
                                    const std::function<void()>& check) override {
    struct Buffers {
      std::vector<std::byte> mine, all;
    };
    // Owned by the call too, which may still write to them when this function has given up.
    const auto buffers = std::make_shared<Buffers>();
    buffers->mine = std::move(mine);
    buffers->all.resize(buffers->mine.size() * static_cast<std::size_t>(bootstrap_.ranks));
    thread_.run(
        "Bootstrap::all_gather",
        [function = bootstrap_.all_gather, buffers] {
          function(buffers->mine.data(), buffers->all.data(), buffers->mine.size());
        },
        check);
    return std::move(buffers->all);
  }

  void barrier(const std::function<void()>& check) override {
    thread_.run("Bootstrap::barrier", bootstrap_.barrier, check);
  }

 private:
  Bootstrap bootstrap_;
  CallbackThread thread_;
};

class DirectLink : public BootstrapLink {
 public:
  explicit DirectLink(const Bootstrap& bootstrap) : bootstrap_(bootstrap) {}

  std::vector<std::byte> all_gather(std::vector<std::byte> mine, const std::function<void()>&) override {
    std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(bootstrap_.ranks));
    bootstrap_.all_gather(mine.data(), all.data(), mine.size());
    return all;
  }

  void barrier(const std::function<void()>&) override { bootstrap_.barrier(); }

 private:
  Bootstrap bootstrap_;
};

}  // namespace

std::unique_ptr<BootstrapLink> link_by_functions(const Bootstrap& bootstrap) {
  return std::make_unique<FunctionLink>(bootstrap);
}

std::unique_ptr<BootstrapLink> link_on_calling_thread(const Bootstrap& bootstrap) {
  return std::make_unique<DirectLink>(bootstrap);
}

}  // namespace ferry
