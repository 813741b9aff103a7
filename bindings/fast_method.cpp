#include "fast_method.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

std::vector<FastMethod*>& declared() {
  static auto* const all = new std::vector<FastMethod*>;
  return *all;
}

PyObject* interned(const char* text) {
  PyObject* const name = PyUnicode_InternFromString(text);
  if (name == nullptr) throw py::error_already_set();
  return name;
}

// The docstring of a function of C++, with its signature. A method descriptor's marks `self`, which is bound.
std::string doc_of(PyObject* function) {
  const char* const doc = reinterpret_cast<PyCFunctionObject*>(function)->m_ml->ml_doc;
  std::string text = doc != nullptr ? doc : "";
  const auto at = text.find("(self");
  if (at != std::string::npos) text.insert(at + 1, "$");
  return text;
}

}  // namespace

bool FastMethod::find(PyObject* const* given, std::size_t n, PyObject* keywords, PyObject** found) const noexcept {
  if (n > positional) return false;
  std::copy_n(given, n, found);
  std::fill(found + n, found + names.size(), nullptr);
  const std::size_t named = keywords == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(keywords));
  for (std::size_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GET_ITEM(keywords, static_cast<Py_ssize_t>(i));
    const auto at = static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    if (at == names.size() || found[at] != nullptr) return false;
    found[at] = given[n + i];
  }
  for (std::size_t i = 0; i < positional; ++i) {
    if (found[i] == nullptr) return false;
  }
  for (std::size_t i = positional; i < names.size(); ++i) {
    if (found[i] == nullptr) found[i] = defaults[i - positional];
  }
  return true;
}

PyObject* FastMethod::call_slow(PyObject* self, PyObject* const* given, std::size_t n,
                                PyObject* keywords) const noexcept {
  const std::size_t named = keywords == nullptr ? 0 : static_cast<std::size_t>(PyTuple_GET_SIZE(keywords));
  try {
    std::vector<PyObject*> arguments(1 + n + named, self);
    std::copy_n(given, n + named, arguments.begin() + 1);
    return PyObject_Vectorcall(slow, arguments.data(), n + 1, keywords);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

void declare_fast_method(const char* name, FastMethod& method, std::size_t count, AnyFunction call,
                         std::initializer_list<const char*> positional, std::initializer_list<py::arg_v> keywords) {
  if (!method.names.empty()) throw py::import_error("kvpool._core is loaded in another interpreter of this process");
  if (positional.size() + keywords.size() != count)
    throw py::import_error(std::string(name) + ": arguments and names differ");
  method.positional = positional.size();
  for (const char* const one : positional) method.names.push_back(interned(one));
  for (const py::arg_v& one : keywords) {
    method.names.push_back(interned(one.name));
    method.defaults.push_back(one.value.inc_ref().ptr());
  }
  method.definition = {name, reinterpret_cast<PyCFunction>(call), METH_FASTCALL | METH_KEYWORDS, nullptr};
  declared().push_back(&method);
}

void install_fast_methods(py::module_& module) {
  const py::object pool = module.attr("Pool");
  const py::object methods = pool.attr("__dict__");
  for (FastMethod* const method : declared()) {
    const char* const name = method->definition.ml_name;
    PyObject* const held = py::object(methods[name]).ptr();
    method->slow = PyInstanceMethod_Check(held) ? PyInstanceMethod_GET_FUNCTION(held) : held;
    Py_INCREF(method->slow);
    method->definition.ml_doc = strdup(doc_of(method->slow).c_str());
    if (method->definition.ml_doc == nullptr) throw std::bad_alloc();
    PyObject* const fast = PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(pool.ptr()), &method->definition);
    if (fast == nullptr) throw py::error_already_set();
    pool.attr(name) = py::reinterpret_steal<py::object>(fast);
  }
}

}  // namespace kvpool::bindings
