// What the program of docs/hosts.md stands in.
#include <ferry/ferry.hpp>

int main() {
  // BLOCK
}
