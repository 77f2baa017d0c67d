// Errors of the shim: a status code that travels in front of the message, because cxx carries text alone.
#pragma once

#include <cstdio>
#include <exception>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

namespace mlxcel {

// Numbers of mlxcel_abi::status.
enum Code : int {
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
};

class Fault : public std::runtime_error {
 public:
  Fault(Code code, const std::string& message)
      : std::runtime_error(message), code_(code) {}
  Code code() const noexcept {
    return code_;
  }

 private:
  Code code_;
};

template <typename... Parts>
[[noreturn]] void fail(Code code, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw Fault(code, message.str());
}

// What an exception of MLX or of the standard library means to the caller.
Code classify(const std::exception& error) noexcept;

// The text that Rust takes apart again: "<code>|<message>".
template <typename Fail>
void report(Fail& fail, int code, const char* message) noexcept {
  char text[2048];
  std::snprintf(text, sizeof(text), "%d|%s", code, message);
  fail(text);
}

} // namespace mlxcel

namespace rust {
namespace behavior {

// Replaces cxx's own translation: MLX also throws things that are no std::exception.
template <typename Try, typename Fail>
static void trycatch(Try&& func, Fail&& fail) noexcept {
  try {
    func();
  } catch (const ::mlxcel::Fault& error) {
    ::mlxcel::report(fail, error.code(), error.what());
  } catch (const std::exception& error) {
    ::mlxcel::report(fail, ::mlxcel::classify(error), error.what());
  } catch (const char* text) {
    ::mlxcel::report(fail, ::mlxcel::kInvalidArgument, text);
  } catch (...) {
    ::mlxcel::report(fail, ::mlxcel::kInternal, "an exception that is no std::exception");
  }
}

} // namespace behavior
} // namespace rust
