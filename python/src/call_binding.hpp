// Binds the methods of Exchange that make a call of a lane. The text of a method's parameters is the only
// place that has their names, order and defaults besides the struct in which they arrive.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "lane_call.hpp"

namespace ferry::python {

// Of each parameter of `signature`, a def of Python, but self and lane: its name and default; None without.
std::vector<std::pair<nb::object, nb::object>> parameters_of(const std::string& signature);

// `Given`: a struct of objects, one for each parameter but self and lane, in their order, of which the first
// `kPositional` may be given by position. `parameters` ends with " -> " and the type that is returned.
template <class Given, std::size_t kPositional, class Returned>
void define_call(nb::class_<PyExchange>& exchange, const char* name, const std::string& parameters,
                 const char* doc,
                 Returned (*function)(PyExchange&, const GivenBesides& besides, const Given&)) {
  const std::string signature = str("def ", name, parameters);
  const auto named = parameters_of(signature);
  const auto parameter = [&](std::size_t i) {
    return nb::arg(nb::cast<const char*>(named.at(i).first)).none() = named[i].second;
  };
  const auto define = [&]<std::size_t... P, std::size_t... K>(std::index_sequence<P...>,
                                                              std::index_sequence<K...>) {
    exchange.def(
        name,
        [function, name](PyExchange& self, UnreadArgument<P>... positional, const nb::args& surplus,
                         UnreadArgument<K>... by_name, const nb::object& lane, const nb::kwargs& unknown) {
          return function(self, {name, lane, surplus, unknown}, Given{positional..., by_name...});
        },
        parameter(P)..., nb::arg("surplus"), parameter(kPositional + K)..., nb::arg("lane").none() = 0,
        nb::arg("unknown"), doc, nb::sig(signature.c_str()));
  };
  constexpr std::size_t kCount = sizeof(Given) / sizeof(nb::object);
  if (named.size() != kCount) throw std::logic_error(signature);
  define(std::make_index_sequence<kPositional>(), std::make_index_sequence<kCount - kPositional>());
}

}  // namespace ferry::python
