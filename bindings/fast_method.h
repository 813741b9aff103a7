// Methods of the pool whose keyword arguments are found by the identity of their names. For each call, pybind11 makes
// a string for the name of every keyword argument that the method has: 1 us for the thirteen of `transfer`, which takes
// 0.6 us for one block.
//
// A method is defined with pybind11 as any other. A fast one then takes its place. It hands every call that is not
// plain (an argument too many or missing, an unknown name, a name that is not interned) to the one of pybind11, so
// errors are the same.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <initializer_list>
#include <type_traits>
#include <utility>
#include <vector>

#include "bind.h"
#include "node.h"

namespace kvpool::bindings {

// What is known of a fast method. Filled once, while the module is made, and never destroyed.
struct FastMethod {
  std::size_t positional = 0;  // all of them required; the others are for keywords alone
  std::vector<PyObject*> names;
  std::vector<PyObject*> defaults;  // of the keywords
  PyObject* slow = nullptr;         // the function of pybind11
  PyMethodDef definition{};

  // The values of all arguments; false if the slow method must be called.
  bool find(PyObject* const* given, std::size_t n, PyObject* keywords, PyObject** found) const noexcept;
  PyObject* call_slow(PyObject* self, PyObject* const* given, std::size_t n, PyObject* keywords) const noexcept;
};

using AnyFunction = void (*)();
// `count`: of the arguments that `call` has room for. Throws ImportError in a second interpreter of the process.
void declare_fast_method(const char* name, FastMethod& method, std::size_t count, AnyFunction call,
                         std::initializer_list<const char*> positional,
                         std::initializer_list<pybind11::arg_v> keywords);

namespace detail {

template <class Function>
struct CountOf;
template <class Result, class... Arguments>
struct CountOf<Result (*)(const NodePointer&, Arguments...)> {
  static constexpr std::size_t value = sizeof...(Arguments);
};

template <auto function>
FastMethod& fast_method() {
  static auto* const method = new FastMethod;
  return *method;
}

template <auto function, std::size_t... I>
PyObject* call_with(const NodePointer& node, PyObject* const* found, std::index_sequence<I...> /*indices*/) {
  auto result = function(node, pybind11::handle(found[I])...);
  if constexpr (std::is_base_of_v<pybind11::handle, decltype(result)>) {
    return result.release().ptr();
  } else {
    return pybind11::cast(std::move(result)).release().ptr();
  }
}

template <auto function>
PyObject* call_fast(PyObject* self, PyObject* const* given, Py_ssize_t n, PyObject* keywords) {
  constexpr std::size_t kCount = CountOf<decltype(function)>::value;
  const FastMethod& method = fast_method<function>();
  std::array<PyObject*, kCount> found;
  try {
    pybind11::detail::make_caster<NodePointer> node;
    if (!method.find(given, static_cast<std::size_t>(n), keywords, found.data()) || !node.load(self, false)) {
      return method.call_slow(self, given, static_cast<std::size_t>(n), keywords);
    }
    return call_with<function>(pybind11::detail::cast_op<const NodePointer&>(node), found.data(),
                               std::make_index_sequence<kCount>());
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (abi::__forced_unwind&) {  // this thread ends with the interpreter
    throw;
  } catch (...) {
    pybind11::detail::try_translate_exceptions();
  }
  return nullptr;
}

}  // namespace detail

// `function` takes the node and the arguments as handles, in the order of `positional` and then `keywords`.
template <auto function>
void make_fast(const char* name, std::initializer_list<const char*> positional,
               std::initializer_list<pybind11::arg_v> keywords) {
  declare_fast_method(name, detail::fast_method<function>(), detail::CountOf<decltype(function)>::value,
                      reinterpret_cast<AnyFunction>(&detail::call_fast<function>), positional, keywords);
}

}  // namespace kvpool::bindings
