#include <map>

#include "tools/ferry/common/config.hpp"
#include "tools/ferry/run/host_experts.hpp"
#include "tools/ferry/run/program_context.hpp"

namespace ferry::app {

namespace {

class HostProgramContext final : public ProgramContext {
 public:
  HostProgramContext(const RunSpec& spec, const Exchange& exchange) : spec_(spec), exchange_(exchange) {}

  InputAddresses set_inputs(const std::vector<std::byte>& tokens, const Routes& routes) override {
    return {tokens.data(), routes.ids.data(), routes.weights.data()};
  }

  // Each call of a program has experts of its own: their outputs live until combine has sent them.
  void run_experts(bool swiglu, const DispatchResult& received, ProgramValue& outputs, Stream) override {
    HostExperts& experts =
        experts_.try_emplace(&outputs, spec_, exchange_.rank().index(), received_row_capacity(exchange_))
            .first->second;
    swiglu ? experts.swiglu(received) : experts.scale(received);
    outputs.data = const_cast<void*>(experts.outputs().data);
  }

  void synchronize() override {}
  std::vector<std::byte> copy_rows(const ProgramValue& tokens) const override {
    const auto* const rows = static_cast<const std::byte*>(tokens.data);
    return {rows, rows + tokens.rows * spec_.row_bytes()};
  }

  void mark(Stream) override { marks_.push_back(now_us()); }
  std::vector<double> take_marks() override { return std::exchange(marks_, {}); }

 private:
  const RunSpec& spec_;
  const Exchange& exchange_;
  std::map<const ProgramValue*, HostExperts> experts_;
  std::vector<double> marks_;
};

}  // namespace

std::unique_ptr<ProgramContext> make_host_program_context(const RunSpec& spec, const Exchange& exchange) {
  return std::make_unique<HostProgramContext>(spec, exchange);
}

}  // namespace ferry::app
