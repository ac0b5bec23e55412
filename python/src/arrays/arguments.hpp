// The arrays of one call, checked: of one framework, in memory that the exchange can use, of the documented
// types and shapes. Every mistake is a UsageError with the argument's name, what was expected and what came.
#pragma once

#include <initializer_list>
#include <memory>

#include "arrays/array.hpp"

namespace ferry::python {

// Whether tensors that require gradients are refused, as an exchange records none, or somebody else records
// them.
enum class Gradients { refused, recorded };

class Arguments {
 public:
  explicit Arguments(Device where, Gradients gradients = Gradients::refused)
      : where_(where), gradients_(gradients) {}

  // Any array of the call.
  const Array& take(nb::handle object, const char* name);

  // Nothing between its elements. A length below 0 is any. `hint` is said to those who bring another shape.
  const Array& dense(nb::handle object, const char* name, Element element, const Shape& shape,
                     const char* hint = "");

  // Rows of `columns` elements; only the step from row to row is free.
  const Array& rows(nb::handle object, const char* name, std::int64_t columns,
                    std::initializer_list<Element> elements);

  Framework framework() const { return framework_; }
  bool any() const { return !taken_.empty(); }
  std::vector<nb::object> owners() const;

 private:
  Array without_lazy_bits(nb::handle tensor, const char* name) const;

  Device where_;
  Gradients gradients_;
  Framework framework_ = Framework::numpy;
  const char* first_ = nullptr;  // the argument that said which framework it is
  std::vector<std::unique_ptr<const Array>> taken_;
};

void require_writable(const Array& array, const char* name);
void require_dense(const Array& array, const char* name);

// Arrays whose leading dimensions are rows: how many, and bytes from row to row (0: dense, or one row at
// most).
struct RowsOf {
  std::int64_t count = 0;
  std::int64_t stride = 0;
};

// Of an array [..., `inner` dimensions of a row].
RowsOf rows_of(const Array& array, const char* name, std::size_t inner = 1);

}  // namespace ferry::python
