// ln and exp with the same bits on every machine, for synthetic traces, which are defined to the bit.
//
// They use IEEE additions, multiplications and divisions alone. std::log and std::exp may differ between
// standard libraries in the last place.
#pragma once

namespace ferry::trace {

// x > 0 and finite. Relative error below 1e-14; near x = 1, absolute error below 1e-16.
double portable_ln(double x);

// |x| <= 700. Relative error below 1e-14.
double portable_exp(double x);

}  // namespace ferry::trace
