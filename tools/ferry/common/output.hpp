// Files the program writes.
#pragma once

#include <string>

namespace ferry::app {

// Where a text goes: a file, standard output (`-`), or nowhere (empty). A path that cannot be written is an
// error when this is made, before the work and not after it. A file appears complete or not at all: the text
// goes to another one beside it, which takes its name at the end; until then its old content stands. What is
// no regular file (a pipe, /dev/null) is written to as it is.
class Output {
 public:
  explicit Output(std::string path);  // SystemError naming the path

  bool wanted() const { return !path_.empty(); }
  bool to_stdout() const { return path_ == "-"; }

  void write(const std::string& text) const;  // SystemError, also for a full disk

 private:
  std::string path_;    // as given
  std::string target_;  // the regular file it leads to; empty for anything else
};

}  // namespace ferry::app
