// Reads the arguments of ferry.deep_ep, and makes the arrays that it returns.
#pragma once

#include <functional>
#include <limits>
#include <string_view>

#include "arrays/arguments.hpp"
#include "arrays/framework.hpp"
#include "base/errors.hpp"
#include "ferry/error.hpp"

namespace ferry::python {

// The names of Buffer's calls of normal mode in place of those of ferry::Exchange.
inline constexpr Phrase kNormalWords[] = {
    {": format is ", ": x is "},
    {"raw on rank", "a tuple of values and scales on rank"},
    {"tokens: ", "x: "},
    {"outputs: ", "x: "},
    {"dispatch_counts on rank", "dispatch of new routes without num_worst_tokens on rank"},
};

// Why a rank refuses a call: the ranks' hosts must agree on an exchange. The others then do so, too.
inline constexpr const char* kMustAgree = "the ranks' hosts must gather their arguments";
inline bool must_agree(const Error& refusal) {
  return std::string_view(refusal.what()).find(kMustAgree) != std::string_view::npos;
}

// What Config allows of max_tokens and experts.
inline constexpr int kMostTokens = 1 << 24, kMostExperts = 1 << 20;

// The properties of a matrix of PyTorch or NumPy. Throws UsageError for other objects.
Array inspect_matrix(const nb::object& object, const char* name);

void require_torch_or_numpy(Framework framework, const char* name);

// Throws UsageError unless rows of the matrix `x` are of 16 bytes or more and multiples of it.
void require_whole_rows(const Array& x, const char* name);

// Throws UsageError unless the matrix topk_idx has 1 to kMaxTopK columns.
void require_slots(const Array& ids);

// The array itself if it is C-contiguous, otherwise a copy that is. `found`: its properties.
nb::object dense_array(const nb::object& array, const Array& found);
// As above; `arguments` keep the original alive until the call has ended.
nb::object dense_array(const nb::object& array, const Array& found, Arguments& arguments);

// An integer from `least` to `most`; throws UsageError for anything else.
int integer_from(int least, const nb::object& number, const char* name,
                 int most = std::numeric_limits<std::int32_t>::max());

bool is_true(const nb::object& flag);

// Element or slice `index` of a handle of `count` elements, of which `element` returns one.
nb::object item_of(const nb::object& index, Py_ssize_t count,
                   const std::function<nb::object(Py_ssize_t)>& element);

}  // namespace ferry::python
