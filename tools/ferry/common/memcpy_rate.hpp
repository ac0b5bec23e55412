// How fast this machine copies memory.
#pragma once

namespace ferry::app {

// Bytes read plus bytes written a second, of `threads` threads that copy at once with memcpy, each between
// its own two buffers, touched before and together larger than the caches. The median of several rounds, each
// as long as its slowest thread; takes about `seconds`. With fewer cores than threads they share them, as
// ranks would.
double measure_memcpy(int threads, double seconds = 0.3);

}  // namespace ferry::app
