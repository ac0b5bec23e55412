// How often tests repeat what random timing may bring to light.
#pragma once

namespace ferry::test {

// `often`, or a fifth of it with sanitizers: each repetition takes many times as long there, and a sanitizer
// reports a race or a wrong access in whatever order the ranks come.
constexpr int repeats(int often) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  return often / 5;
#else
  return often;
#endif
}

}  // namespace ferry::test
