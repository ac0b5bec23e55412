#include <ferry/version.hpp>
#include <iostream>

int main() {
  std::cout << "ferry " << ferry::version() << '\n';
  return ferry::version().empty() ? 1 : 0;
}
