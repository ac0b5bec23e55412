// Formats numbers for people, with three or four digits and a unit with a decimal prefix, and colours words.
#pragma once

#include <cstdint>
#include <string>

namespace ferry::report {

std::string with_thousands(std::int64_t value);             // 1,234,567
std::string counted(std::int64_t number, const char* one);  // 1 rank, 2,000 ranks
std::string in_mean(double mean);                           // 0.31, 12.8, 1,250
std::string in_time(double us);                             // 12.3 us, 1.23 ms, 4.56 s
std::string in_bytes(double bytes);                         // 512 B, 1.23 kB, 45.6 MB
std::string in_bytes_per_second(double per_second);         // 12.3 GB/s
std::string in_percent(double share);                       // 71.3 %
std::string in_times(double ratio);                         // 1.42 x

enum class Tone { good, bad, doubtful };
// The text in a colour of the terminal: green, bold red, yellow. As it is without `coloured`.
std::string toned(const std::string& text, Tone tone, bool coloured);

}  // namespace ferry::report
