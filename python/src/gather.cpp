// Exchange.all_gather_v and reduce_scatter_v.
#include <optional>

#include "arrays/arguments.hpp"
#include "base/text.hpp"
#include "bindings.hpp"
#include "call_binding.hpp"
#include "cast.hpp"
#include "dispatch.hpp"
#include "interpreter.hpp"
#include "lane_call.hpp"

namespace ferry::python {

using namespace nb::literals;

namespace {

// An array of dense rows, [count, ...].
struct DenseRows {
  const Array* array = nullptr;
  std::int64_t row_bytes = 0;

  void* data() const { return array->data; }
  std::int64_t count() const { return array->shape[0]; }
};

DenseRows dense_rows(Arguments& arguments, const nb::object& object, const char* name) {
  const Array& array = arguments.add(object, name);
  if (array.shape.empty()) throw UsageError(str(name, ": expected an array of rows, got a scalar"));
  require_dense(array, name);
  std::int64_t row_bytes = array.element_bytes();
  for (std::size_t i = 1; i < array.shape.size(); ++i) row_bytes *= array.shape[i];
  return {&array, row_bytes};
}

DenseRows rows_to_write(Arguments& arguments, const nb::object& out, const DenseRows& rows) {
  const DenseRows to = dense_rows(arguments, out, "out");
  require_writable(*to.array, "out");
  if (to.array->element != rows.array->element || to.row_bytes != rows.row_bytes) {
    throw UsageError(str("out: has rows of ", to.row_bytes, " bytes of ", name_of(to.array->element),
                         ", but `rows` has rows of ", rows.row_bytes, " bytes of ",
                         name_of(rows.array->element), ": pass an array of the same type and row length"));
  }
  return to;
}

// Where the number of rows is in device memory; null: it is that of the array.
const std::int32_t* device_count_of(Arguments& arguments, const nb::object& count) {
  if (count.is_none()) return nullptr;
  if (PyLong_Check(count.ptr()) != 0) {
    throw UsageError(
        "count: expected an int32 array [1] in device memory, got a number: the number of rows is that of "
        "the "
        "array, so pass a slice of it");
  }
  if (is_host(arguments.device())) {
    throw UnsupportedError(
        "count: the exchange has host memory, where the number of rows is that of the array: pass a slice of "
        "it");
  }
  return static_cast<const std::int32_t*>(arguments.dense(count, "count", kInt32, {1}).data);
}

struct GatherArguments {
  nb::object rows, out, count, stream;
};

nb::object all_gather_v(PyExchange& self, const GivenBesides& besides, const GatherArguments& given) {
  LaneCall call(self, {Operation::all_gather_v}, besides);
  Arguments arguments(call.device());
  DenseRows from, to;
  const std::int32_t* device_count = nullptr;
  call.read_or_refuse({Operation::all_gather_v}, [&] {
    from = dense_rows(arguments, given.rows, "rows");
    to = rows_to_write(arguments, given.out, from);
    device_count = device_count_of(arguments, given.count);
    call.set_stream(stream_of(given.stream, arguments.framework(), call.device()));
  });
  std::int64_t total = 0;
  {
    const GilRelease unlocked;
    total = call.exchange().all_gather_v({.rows = from.data(),
                                          .count = from.count(),
                                          .row_bytes = from.row_bytes,
                                          .gathered = to.data(),
                                          .capacity = to.count(),
                                          .device_count = device_count},
                                         call.options());
  }
  if (total < 0 || total == to.count()) return given.out;
  return given.out[nb::slice(nb::int_(0), nb::int_(total), nb::int_(1))];
}

nb::object reduce_scatter_v(PyExchange& self, const GivenBesides& besides, const GatherArguments& given) {
  LaneCall call(self, {Operation::reduce_scatter_v}, besides);
  Arguments arguments(call.device());
  DenseRows from, to;
  std::optional<DType> type;
  const std::int32_t* device_count = nullptr;
  call.read_or_refuse({Operation::reduce_scatter_v}, [&] {
    from = dense_rows(arguments, given.rows, "rows");
    type = value_type_of(from.array->element);
    if (!type) {
      throw UsageError(
          str("rows: expected bfloat16, float16 or float32, got ", name_of(from.array->element)));
    }
    const std::int64_t hidden = self.config().hidden;
    if (from.row_bytes != hidden * bytes_of(*type)) {
      throw UsageError(str("rows: expected rows of ", counted(hidden, "column"), ", got rows of ",
                           from.row_bytes / bytes_of(*type)));
    }
    to = rows_to_write(arguments, given.out, from);
    device_count = device_count_of(arguments, given.count);
    call.set_stream(stream_of(given.stream, arguments.framework(), call.device()));
  });
  {
    const GilRelease unlocked;
    call.exchange().reduce_scatter_v({.rows = from.data(),
                                      .total = from.count(),
                                      .type = *type,
                                      .sums = to.data(),
                                      .count = to.count(),
                                      .device_count = device_count},
                                     call.options());
  }
  return given.out;
}

}  // namespace

void bind_gather(nb::class_<PyExchange>& exchange) {
  constexpr const char* kParameters =
      "(self, rows: ferry._typing.Array, out: ferry._typing.Array, *, count: ferry._typing.Array | None = "
      "None, "
      "lane: int = 0, stream: typing.Any | None = None) -> typing.Any";
  define_call<GatherArguments, 2>(
      exchange, "all_gather_v", kParameters,
      R"(Copies the rows of all ranks into `out`, in rank order, and returns its rows that were written. Collective.

`rows` is [n, ...] of any type; every rank has its own n, 0 too. `out` is [sum of n or more, ...] of the same type; rows
past the sum are not written. `rows` may be this rank's own rows of `out`, those from the sum of the counts of lower ranks on. On
device memory the host does not know the sum, and all of `out` is returned; `count`, an int32 array [1] there, may
hold n instead, at most the number of `rows`.)",
      all_gather_v);
  define_call<GatherArguments, 2>(
      exchange, "reduce_scatter_v", kParameters,
      R"(Adds the ranks' `rows`, writes this rank's rows of the sum to `out`, and returns `out`. Collective.

`rows` is [sum of n, H] of bfloat16, float16 or float32 on every rank, `out` [n, H] of the same type, with this rank's
n. The first rows of the sum belong to rank 0, and so on. Each value is added in fp32, in rank order from +0, and
rounded once. `out` may be this rank's own rows of `rows`. `count` as in all_gather_v(); `rows` may then have more rows than
the sum.)",
      reduce_scatter_v);
}

}  // namespace ferry::python
