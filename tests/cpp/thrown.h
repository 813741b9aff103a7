// The error that a call throws, as a value to compare.
#pragma once

#include <optional>
#include <string>

#include "kvpool/base/error.h"

namespace kvpool::testing {

// Nothing when it throws none.
template <class Call>
std::optional<Error> error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

// The same; `text` is set to what it says.
template <class Call>
std::optional<ErrorCode> code_of(Call&& call, std::string* text = nullptr) {
  const auto error = error_of(call);
  if (error && text != nullptr) *text = error->what();
  return error ? std::optional(error->code()) : std::nullopt;
}

// "" when it throws none.
template <class Call>
std::string text_of(Call&& call) {
  const auto error = error_of(call);
  return error ? error->what() : "";
}

}  // namespace kvpool::testing
