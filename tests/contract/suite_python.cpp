// The contract suite through the Python package, with ranks as threads. The program embeds the interpreter,
// and the package's module is linked into it, so both use one libferry.
#include <Python.h>

#include "harness/harness.hpp"

extern "C" PyObject* PyInit__core();

namespace ferry::contract {

INSTANTIATE_TEST_SUITE_P(Python, Contract, testing::Values(Setup{.language = &kPython}));

namespace {

void require_status(const PyStatus& status) {
  if (PyStatus_Exception(status) != 0) Py_ExitStatusException(status);
}

// FERRY_PYTHON_PROGRAM: the Python of the build, which has NumPy. FERRY_PYTHON_PACKAGE: the folder of
// `ferry`.
void start_python() {
  PyImport_AppendInittab("ferry._core", PyInit__core);
  PyConfig config;
  PyConfig_InitPythonConfig(&config);
  require_status(PyConfig_SetBytesString(&config, &config.program_name, FERRY_PYTHON_PROGRAM));
  require_status(PyConfig_SetBytesString(&config, &config.pythonpath_env, FERRY_PYTHON_PACKAGE));
  require_status(Py_InitializeFromConfig(&config));
  PyConfig_Clear(&config);
  // Python does not look for linked modules in packages.
  PyRun_SimpleString(R"(
import sys
from importlib.machinery import BuiltinImporter, ModuleSpec

class Linked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, BuiltinImporter) if name == "ferry._core" else None

sys.meta_path.insert(0, Linked)
import ferry
)");
}

}  // namespace

}  // namespace ferry::contract

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  ferry::contract::start_python();
  PyThreadState* const main_thread =
      PyEval_SaveThread();  // ranks are threads, which take the lock for a call
  const int status = RUN_ALL_TESTS();
  PyEval_RestoreThread(main_thread);
  return Py_FinalizeEx() != 0 ? 1 : status;
}
