// Objects with threads, mappings or peers belong to the process that made them; a
// forked child must not use them.
#pragma once

#include <memory>
#include <utility>

#include "base/process.hpp"
#include "casters.hpp"
#include "interpreter.hpp"

namespace ferry::python {

// Destruction may wait for peers or devices, so it runs without the GIL. A forked child does not destroy the
// object: its threads and mappings are the parent's.
template <class T, class... Argument>
std::shared_ptr<T> make_process_owned(Argument&&... arguments) {
  return std::shared_ptr<T>(new T{std::forward<Argument>(arguments)...},
                            [process = this_process()](T* object) {
                              if (this_process() != process) return;
                              if (PyGILState_Check() == 0) {
                                delete object;
                                return;
                              }
                              const GilRelease unlocked;
                              delete object;
                            });
}

}  // namespace ferry::python
