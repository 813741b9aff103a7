// What help() and inspect.signature() say of the functions in C++: the signatures of src/kvpool/_core.pyi, which the
// build makes a table of (cmake/signatures.py), in place of those that pybind11 makes up, where most arguments are
// `object`.
#include <pybind11/pybind11.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <string>

#include "bind.h"

namespace py = pybind11;

namespace kvpool::bindings {
namespace {

struct SignatureRow {
  const char* owner;  // a class, or "" for the module
  const char* name;
  const char* plain;  // as inspect.signature reads it
  const char* shown;  // with types, for readers
};

constexpr SignatureRow kSignatures[] = {
#include "signatures.inc"
};

// The function of C++ under a name of a class or module; none if somebody else made what is there.
PyObject* function_under(const py::object& owner, const char* name) {
  const auto names = owner.attr("__dict__");
  if (!names.contains(name)) return nullptr;
  const py::object held = names[name];
  PyObject* function = held.ptr();
  if (PyInstanceMethod_Check(function)) function = PyInstanceMethod_GET_FUNCTION(function);
  // The class keeps what a static method wraps.
  if (py::isinstance<py::staticmethod>(held)) function = py::object(held.attr("__func__")).ptr();
  return PyCFunction_Check(function) != 0 ? function : nullptr;
}

void show(PyObject* function, const SignatureRow& row) {
  PyMethodDef* method = reinterpret_cast<PyCFunctionObject*>(function)->m_ml;
  const std::string old = method->ml_doc != nullptr ? method->ml_doc : "";
  const auto end = old.find('\n');  // of the signature that pybind11 made up
  const std::string body = end == std::string::npos ? "" : old.substr(end);
  const std::string text = std::string(row.plain) + "\n--\n\n" + row.shown + body;
  char* copy = strdup(text.c_str());
  if (copy == nullptr) throw std::bad_alloc();
  // pybind11 has allocated it so, and frees what it finds there.
  std::free(const_cast<char*>(method->ml_doc));
  method->ml_doc = copy;
}

}  // namespace

void show_signatures(py::module_& module) {
  for (const SignatureRow& row : kSignatures) {
    const py::object owner = *row.owner == '\0' ? py::object(module) : py::object(module.attr(row.owner));
    if (PyObject* function = function_under(owner, row.name)) show(function, row);
  }
}

}  // namespace kvpool::bindings
