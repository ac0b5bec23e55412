#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cerrno>
#include <random>

#include "ferry/error.hpp"
#include "trace/files.hpp"
#include "trace/npy.hpp"

namespace {

using namespace trace_test;
using ferry::UsageError;
using ferry::trace::NpyArray;

void read(const std::string& file) {
  NpyArray("bad.npy", to_bytes(file));
}

const std::string kValid = npy(header("<i4", "(2, 3)"), std::string(24, '\x01'));

TEST(NpyHostile, RefusesEveryTruncation) {
  ASSERT_NO_THROW(read(kValid));
  for (std::size_t size = 0; size < kValid.size(); ++size) {
    SCOPED_TRACE(size);
    EXPECT_THROWS(read(kValid.substr(0, size)), UsageError, "bad.npy: offset ");
  }
}

TEST(NpyHostile, RefusesEveryTruncatedHeader) {
  const std::string whole = header("<i4", "(2, 3)");
  const std::size_t end = whole.find('}') + 1;
  for (std::size_t size = 0; size < end; ++size) {
    SCOPED_TRACE(size);
    EXPECT_THROWS(read(npy(whole.substr(0, size), std::string(24, '\x01'))), UsageError, "bad.npy: offset ");
  }
}

TEST(NpyHostile, SurvivesEveryChangedByte) {
  const std::size_t data = kValid.size() - 24;
  for (std::size_t at = 0; at < data; ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string file = kValid;
      file[at] = static_cast<char>(value);
      try {
        read(file);
      } catch (const UsageError&) {
      }
    }
  }
}

TEST(NpyHostile, RefusesExtraAndMissingBytesWithTheirNumber) {
  EXPECT_THROWS(read(kValid + "x"), UsageError, "expected 24 bytes, found 25");
  EXPECT_THROWS(read(kValid.substr(0, kValid.size() - 1)), UsageError, "expected 24 bytes, found 23");
}

TEST(NpyHostile, RefusesWrongMagicAndVersion) {
  EXPECT_THROWS(read(""), UsageError, "offset 0: magic and version: expected 8 bytes, found 0");
  EXPECT_THROWS(read("PK\x03\x04 a zip archive"), UsageError, "offset 0: expected the magic");
  for (const int major : {0, 4, 255}) {
    EXPECT_THROWS(read(npy(header("<i4", "(0,)"), "", major)), UsageError,
                  "offset 6: expected version 1.0, 2.0 or 3.0, found " + std::to_string(major) + ".0");
  }
  std::string file = kValid;
  file[7] = 1;
  EXPECT_THROWS(read(file), UsageError, "found 1.1");
}

TEST(NpyHostile, RefusesHugeHeaderLength) {
  std::string file = "\x93NUMPY";
  file += std::string("\x02\x00\xff\xff\xff\xff", 6) + "{}";
  EXPECT_THROWS(read(file), UsageError, "offset 12: header: expected 4294967295 bytes, found 2");
}

struct BadHeader {
  const char* header;
  const char* message;
};

TEST(NpyHostile, RefusesBadHeaders) {
  const BadHeader cases[] = {
      {"", "offset 10: expected '{', found the end of the header"},
      {"{}", "expected the key 'descr' in the header"},
      {"{'descr': '<i4', 'shape': (2,)}", "expected the key 'fortran_order'"},
      {"{'descr': '<i4', 'fortran_order': False}", "expected the key 'shape'"},
      {"{'descr': '<i4', 'descr': '<i4'}", "offset 27: expected the key 'descr' once"},
      {"{'fortran_order': False, 'fortran_order': False}", "'fortran_order' once"},
      {"{'shape': (), 'shape': ()}", "'shape' once"},
      {"{'color': '<i4'}", "found 'color'"},
      {"{descr: '<i4'}", "offset 11: expected a quoted string, found 'd'"},
      {"{'descr' '<i4'}", "expected ':', found '''"},
      {"{'descr': '<i4' 'shape': ()}", "expected ',', found '''"},
      {"{,}", "expected a quoted string, found ','"},
      {"{'descr': '>i4', ", "big-endian arrays are not supported"},
      {"{'descr': '|O', ", "arrays of Python objects are not supported"},
      {"{'descr': 'O', ", "arrays of Python objects are not supported"},
      {"{'descr': '<f8', ", "this type is not supported"},
      {"{'descr': '|b1', ", "this type is not supported"},
      {"{'descr': '<c8', ", "this type is not supported"},
      {"{'descr': '<U7', ", "this type is not supported"},
      {"{'descr': '|i4', ", "this type is not supported"},
      {"{'descr': '', ", "this type is not supported"},
      {"{'descr': [('a', '<i4')], ", "structured arrays are not supported"},
      {"{'descr': 4, ", "expected a quoted string, found '4'"},
      {"{'descr': '<i4\\'', ", "found '\\'"},
      {"{'descr': '<i\xc3\xa4', ", "found byte 0xc3"},
      {"{'d\xc3\xa4scr': '<i4', ", "found byte 0xc3"},
      {"{'fortran_order': True, ", "Fortran order is not supported"},
      {"{'fortran_order': 0, ", "expected fortran_order False, found '0'"},
      {"{'fortran_order': 'False', ", "expected fortran_order False, found '''"},
      {"{'shape': (-1,), ", "offset 21: expected a dimension of 0 or more, found a negative one"},
      {"{'shape': (2), ", "expected ',' after the only dimension"},
      {"{'shape': [2], ", "expected '(', found '['"},
      {"{'shape': (2 3), ", "expected ',', found '3'"},
      {"{'shape': (,), ", "expected a dimension, found ','"},
      {"{'shape': (2.0,), ", "expected ',', found '.'"},
      {"{'shape': (2L,), ", "expected ',', found 'L'"},
      {"{'shape': (0x2,), ", "expected ',', found 'x'"},
      {"{'shape': (1, 1, 1, 1, 1), ", "expected at most 4 dimensions"},
      {"{'shape': (18446744073709551616,), ", "expected a dimension of at most 18446744073709551615"},
      {"{'shape': (99999999999999999999999999999,), ", "expected a dimension of at most"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (18446744073709551615,)}",
       "found [18446744073709551615]"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}",
       "found [4294967296, 4294967296]"},
      {"{'descr': '|u1', 'fortran_order': False, 'shape': (2147483648, 2147483648, 8)}", "elements, found"},
      {"{'descr': '|u1', 'fortran_order': False, 'shape': (9223372036854775807,)}",
       "expected 9223372036854775807 bytes, found 0"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (0,)} x",
       "expected only spaces after the header, found 'x'"},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (0,)}}", "expected only spaces after the header"},
      {"(1,)", "offset 10: expected '{', found '('"},
  };
  for (const BadHeader& bad : cases) {
    SCOPED_TRACE(bad.header);
    EXPECT_THROWS(read(npy(bad.header, "")), UsageError, bad.message);
  }
}

TEST(NpyHostile, RefusesZeroBytesInTheHeader) {
  std::string text = header("<i4", "(0,)");
  for (std::size_t at = 0; at < text.find('}'); ++at) {
    std::string changed = text;
    changed[at] = '\0';
    SCOPED_TRACE(at);
    EXPECT_THROWS(read(npy(changed, "")), UsageError, "bad.npy: offset ");
  }
}

TEST(NpyHostile, RefusesAnythingButARegularFile) {
  const TempFolder folder;
  EXPECT_THROWS(ferry::trace::open_npy(folder / "absent.npy"), UsageError, "absent.npy: no such file");
  EXPECT_THROWS(ferry::trace::open_npy("/dev/null/absent.npy"), UsageError, "absent.npy: no such file");
  EXPECT_THROWS(ferry::trace::open_npy(folder / ""), UsageError, "expected a regular file");
  EXPECT_THROWS(ferry::trace::open_npy("/dev/zero"), UsageError, "/dev/zero: expected a regular file");
  ASSERT_EQ(mkfifo((folder / "pipe.npy").c_str(), 0600), 0);
  EXPECT_THROWS(ferry::trace::open_npy(folder / "pipe.npy"), UsageError, "expected a regular file");
}

TEST(NpyHostile, ReportsTheErrnoOfAFileThatCannotBeOpened) {
  const std::string too_long(5000, 'x');
  try {
    ferry::trace::open_npy(too_long + ".npy");
    FAIL();
  } catch (const ferry::SystemError& error) {
    EXPECT_EQ(error.error_number, ENAMETOOLONG);
    EXPECT_EQ(error.code(), ferry::ErrorCode::system);
  }
}

}  // namespace
