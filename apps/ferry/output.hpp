// Files the program writes.
#pragma once

#include <string>

namespace ferry::app {

// Where a text goes: a file, standard output (`-`), or nowhere (empty). A file is opened when this is made,
// so that a path that cannot be written is an error before the work and not after it. Its old content stands
// until write() replaces it.
class Output {
 public:
  explicit Output(std::string path);  // SystemError naming the path

  bool wanted() const { return !path_.empty(); }
  bool to_stdout() const { return path_ == "-"; }
  const std::string& path() const { return path_; }

  void write(const std::string& text) const;  // SystemError, also for a full disk

 private:
  std::string path_;
};

}  // namespace ferry::app
