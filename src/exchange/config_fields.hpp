// The fields of Config: one table, by which ranks compare them, enumerators are checked, and C and Python
// convert.
#pragma once

namespace ferry {

// Calls visit(name, field...), with the field of each struct, for the fields that Config and C's ferry_config
// have under one name. Ranks name the first that differs, so `hops`, which construction chooses, follows
// what the choice depends on.
template <class Visit, class... Configs>
void visit_common_fields(const Visit& visit, Configs&... configs) {
  visit("experts", configs.experts...);
  visit("top_k", configs.top_k...);
  visit("hidden", configs.hidden...);
  visit("max_tokens", configs.max_tokens...);
  visit("backend", configs.backend...);
  visit("engine", configs.engine...);
  visit("memory", configs.memory...);
  visit("local_slots", configs.local_slots...);
  visit("shared_experts", configs.shared_experts...);
  visit("input", configs.input...);
  visit("shared_split", configs.shared_split...);
  visit("transfer", configs.transfer...);
  visit("hops", configs.hops...);
  visit("window", configs.window...);
  visit("layout", configs.layout...);
  visit("alignment", configs.alignment...);
  visit("capacity", configs.capacity...);
  visit("repeats", configs.repeats...);
  visit("zero_padding", configs.zero_padding...);
  visit("format", configs.format...);
  visit("combine_type", configs.combine_type...);
  visit("reduction", configs.reduction...);
  visit("reduction_level", configs.reduction_level...);
  visit("layers", configs.layers...);
  visit("lanes", configs.lanes...);
  visit("deadline", configs.deadline...);
  visit("count_waits", configs.count_waits...);
}

// Calls visit(name, field) for every field of a Config.
template <class Visit, class Config>
void visit_fields(const Visit& visit, Config& config) {
  visit_common_fields(visit, config);
  visit("placement", config.placement);
  visit("own_receive_buffers", config.own_receive_buffers);
  visit("check_calls", config.check_calls);
}

}  // namespace ferry
