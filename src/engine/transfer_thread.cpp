#include "engine/transfer_thread.hpp"

#include <system_error>
#include <utility>

#include "base/errors.hpp"
#include "base/process.hpp"

namespace ferry {

TransferThread::TransferThread() {
  const ScopedSignalBlock no_signals;
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw system_error("cannot start the thread of a lane", error.code().value());
  }
}

TransferThread::~TransferThread() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::future<std::exception_ptr> TransferThread::submit(std::function<void()> transfer) {
  std::packaged_task<std::exception_ptr()> task([run = std::move(transfer)]() -> std::exception_ptr {
    try {
      run();
      return nullptr;
    } catch (...) {
      return std::current_exception();
    }
  });
  std::future<std::exception_ptr> done = task.get_future();
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(task));
  }
  changed_.notify_all();
  return done;
}

bool TransferThread::try_run(const std::function<void()>& transfer) {
  {
    const std::lock_guard lock(mutex_);
    if (running_ || !queue_.empty()) return false;
    running_ = true;
  }
  struct End {
    TransferThread& of;
    ~End() {
      {
        const std::lock_guard lock(of.mutex_);
        of.running_ = false;
      }
      of.changed_.notify_all();
    }
  } const end{*this};
  transfer();
  return true;
}

void TransferThread::serve() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !running_ && (stopping_ || !queue_.empty()); });
    if (queue_.empty()) return;
    std::packaged_task<std::exception_ptr()> task = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    lock.unlock();
    task();
    lock.lock();
    running_ = false;
  }
}

}  // namespace ferry
