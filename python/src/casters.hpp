// nanobind and its conversions of standard types. Every file of the module includes the same set: one without
// a conversion that it needs would compile, and throw std::bad_cast when it runs.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/operators.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

// GilRelease and GilAcquire of interpreter.hpp stand for them: they survive the end of the interpreter.
#pragma GCC poison gil_scoped_acquire gil_scoped_release
