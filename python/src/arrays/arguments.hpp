// Checks the arrays of one call: one framework, memory that the exchange can reach, documented types and
// shapes. Every violation is a UsageError with the argument's name, what was expected, and what was passed.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>

#include "array.hpp"

namespace ferry::python {

// Tensors that require gradients: refused, because an exchange does not record gradients, or
// accepted, because the caller does.
enum class Gradients { refused, recorded };

class Arguments {
 public:
  explicit Arguments(Device device, Gradients gradients = Gradients::refused)
      : device_(device), gradients_(gradients) {}

  // The call's argument `stream`, which copies are made on. Until it is given: the current stream.
  void set_stream(nb::object given) { stream_ = std::move(given); }

  // Any array of the call.
  const Array& add(nb::handle object, const char* name);

  // As add(), for ids, weights and other numbers, few beside the rows: if they are not C-contiguous they are
  // copied. On a device only PyTorch can, and only if the call is on its current stream.
  const Array& add_numbers(nb::handle object, const char* name);

  // A C-contiguous array of this type and shape; a negative length matches any. `hint` ends the
  // message about a wrong shape.
  const Array& dense(nb::handle object, const char* name, Element element, const Shape& shape,
                     const char* hint = "");

  // As dense(), but copies as add_numbers() does.
  const Array& numbers(nb::handle object, const char* name, Element element, const Shape& shape,
                       const char* hint = "");

  // An array of one element, without dimensions or with one.
  const Array& one(nb::handle object, const char* name, Element element);

  // Rows of `columns` elements, with any step from row to row.
  const Array& rows(nb::handle object, const char* name, std::int64_t columns,
                    std::initializer_list<Element> elements);

  Framework framework() const { return framework_; }
  Device device() const { return device_; }
  bool any() const { return !arrays_.empty(); }
  // Also keeps what a copy was made of, which the call's stream may read later.
  void keep_original(nb::object original) { originals_.push_back(std::move(original)); }

  // The call's arrays, and the originals of those that were copied.
  std::vector<nb::object> owners() const;

 private:
  Array resolve_lazy_bits(nb::handle tensor, const char* name) const;
  Array checked(nb::handle object, const char* name);
  const Array& keep(Array array);
  bool is_on_current_stream() const;

  Device device_;
  Gradients gradients_;
  nb::object stream_ = nb::none();
  Framework framework_ = Framework::numpy;
  std::string first_name_;  // the argument that determined the framework
  std::vector<std::unique_ptr<const Array>> arrays_;
  std::vector<nb::object> originals_;
};

void require_element(const Array& array, const char* name, std::initializer_list<Element> elements);
void require_writable(const Array& array, const char* name);
bool is_dense(const Array& array);  // C-contiguous
void require_dense(const Array& array, const char* name);

// Rows that lie equally far apart.
struct StridedRows {
  std::int64_t count = 0;
  std::int64_t stride = 0;  // bytes from row to row; 0: dense, or at most one row
};

// The rows of an array [..., inner dimensions of one row]. Throws UsageError if they
// are not equally far apart.
StridedRows strided_rows(const Array& array, const char* name, std::size_t inner = 1);

}  // namespace ferry::python
