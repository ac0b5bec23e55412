// A thread that carries out transfers in the order in which they were submitted.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <thread>

namespace ferry {

// Thread-safe. The destructor waits for the transfers that were submitted.
class TransferThread {
 public:
  TransferThread();  // throws SystemError if the system refuses a thread
  ~TransferThread();
  TransferThread(const TransferThread&) = delete;
  TransferThread& operator=(const TransferThread&) = delete;

  // Future: the exception of `transfer`, or null. get() takes it out of the state that
  // the future shares with the thread, so the exception ends in the caller's thread alone.
  std::future<std::exception_ptr> submit(std::function<void()> transfer);

  // Runs `transfer` in the calling thread and returns true, unless another transfer is running or waiting:
  // that saves waking two threads. Throws what it throws.
  bool try_run(const std::function<void()>& transfer);

 private:
  void serve();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::packaged_task<std::exception_ptr()>> queue_;
  bool running_ = false;  // a transfer, in any thread
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ferry
