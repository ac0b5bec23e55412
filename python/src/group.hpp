// Groups and ranks as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "ferry/config.hpp"
#include "ferry/group.hpp"

namespace ferry::python {

struct PyRank {
  Rank rank;
  int process;  // that it belongs to

  const Rank& own() const;
};

class PyGroup {
 public:
  explicit PyGroup(Group group, BackendKind backend = BackendKind::cpu, bool starts_threads = false);

  const Group& group() const { return group_; }
  BackendKind default_backend() const { return backend_; }
  void set_deadline(double seconds) { group_.set_deadline(seconds); }

  // What `body` returned, of every rank that this process ran, in their order.
  std::vector<nanobind::object> run(const nanobind::callable& body);

  // This process's rank. The first call is collective; the rank leaves with leave() or the last that uses it.
  PyRank join();
  void leave() { joined_.reset(); }

 private:
  Group group_;
  BackendKind backend_;
  bool starts_threads_;
  int process_;
  std::optional<PyRank> joined_;
};

}  // namespace ferry::python
