// ln and exp from IEEE additions, multiplications and divisions alone: the same bits with every standard
// library, where std::log and std::exp may differ in the last place. For synthesised traces, which are
// defined to the bit.
#pragma once

namespace ferry::trace {

// Relative error below 1e-14, absolute error near 1 below 1e-16. x > 0 and finite.
double portable_ln(double x);

// Relative error below 1e-14. |x| <= 700.
double portable_exp(double x);

}  // namespace ferry::trace
