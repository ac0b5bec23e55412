#include "tools/ferry/common/documents.hpp"

#include <system_error>

namespace ferry::app {

namespace fs = std::filesystem;

fs::path documents_folder() {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored).parent_path();
  for (const fs::path& folder :
       {program / "documents", program.parent_path() / FERRY_DATAROOTDIR / "doc" / "ferry"}) {
    if (fs::is_directory(folder / "docs", ignored)) return folder;
  }
  return {};
}

std::string document(std::string_view name) {
  return (documents_folder() / name).string();
}

}  // namespace ferry::app
