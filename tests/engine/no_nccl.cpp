// A shared library that is not NCCL.
extern "C" int ferry_is_no_nccl() {
  return 1;
}
