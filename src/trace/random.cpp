#include "trace/random.hpp"

#include <cmath>

namespace ferry::trace {
namespace {

constexpr double kLn2 = 0.693147180559945309417232121458;
constexpr double kSqrtHalf = 0.707106781186547524400844362105;

}  // namespace

// x = m * 2^e with m near 1; ln m = 2 artanh(t) = 2 (t + t^3/3 + t^5/5 + ...), t = (m-1)/(m+1), |t| < 0.172.
double portable_ln(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);
  if (m < kSqrtHalf) {
    m *= 2;
    --exponent;
  }
  const double t = (m - 1) / (m + 1);
  const double square = t * t;
  double sum = 0;
  for (int power = 21; power >= 1; power -= 2) sum = sum * square + 1.0 / power;
  return exponent * kLn2 + 2 * t * sum;
}

// x = r + n ln 2 with |r| <= ln(2)/2; exp r by its Taylor series.
double portable_exp(double x) {
  const double n = std::floor(x / kLn2 + 0.5);
  const double r = x - n * kLn2;
  double sum = 1;
  for (int i = 16; i >= 1; --i) sum = 1 + sum * r / i;
  return std::ldexp(sum, static_cast<int>(n));
}

}  // namespace ferry::trace
