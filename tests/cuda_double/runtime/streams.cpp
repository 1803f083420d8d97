// Streams and events. With CUDA_DOUBLE_ASYNC=1 each stream has a thread that runs its tasks later, in order. Otherwise a task
// runs when it is enqueued.
#include <time.h>
#include <unistd.h>

#include <thread>

#include "runtime.h"

namespace cuda_double {
namespace {

struct Recording {  // one recording of an event
  bool is_done = false;
  double at_s = 0;
  Clock clock;
};

struct Event {
  unsigned flags = 0;
  std::shared_ptr<Recording> recording;  // the last one
};

std::map<unsigned, Stream*>& streams() {  // by id; default streams start at FIRST_DEFAULT
  static auto* all = new std::map<unsigned, Stream*>;
  return *all;
}
const unsigned FIRST_DEFAULT = 1u << 20;

double now_s() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

Stream* new_stream(unsigned id, int device, const Lock& lock) {
  auto* stream = new Stream;
  stream->id = id < FIRST_DEFAULT ? id : 0;
  stream->device = device;
  stream->clock_index = new_clock_index(lock);
  stream->random = (settings().seed * 2654435761u) ^ (id * 40503u + 1);
  streams()[id] = stream;
  return stream;
}

void run_tasks_of(Stream* stream) {
  this_thread_is_a_worker();
  Lock lock(state_mutex());
  for (;;) {
    stream->work.wait(lock, [&] { return !stream->queue.empty(); });
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = &task;
    lock.unlock();
    if (task.delay_s > 0) usleep((useconds_t)(task.delay_s * 1e6));
    task.run();
    task.run = nullptr;
    lock.lock();
    stream->running = nullptr;
    something_finished().notify_all();
  }
}

void wait_until_idle(std::vector<Stream*> which, Lock& lock) {
  Clock reached;
  for (auto* stream : which) join(reached, stream->clock);
  something_finished().wait(lock, [&] {
    for (auto* stream : which)
      if (!stream->is_idle()) return false;
    return true;
  });
  host_learns(reached, lock);
}

}  // namespace

std::mutex& state_mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

std::condition_variable& something_finished() {
  static auto* condition = new std::condition_variable;
  return *condition;
}

int& current_device() {
  static thread_local int device = 0;
  return device;
}

Stream* stream_of(cudaStream_t handle) {
  if ((uintptr_t)handle > 2) return (Stream*)handle;  // 0 to 2 are handles of the default stream
  unsigned id = FIRST_DEFAULT + current_device();
  Lock lock(state_mutex());
  auto known = streams().find(id);
  return known != streams().end() ? known->second : new_stream(id, current_device(), lock);
}

void enqueue(Stream* stream, const char* what, double delay_s, std::vector<Access> accesses, std::function<void()> run) {
  count("tasks");
  if (settings().finds_races) check_races(stream, what, accesses);
  if (!settings().is_async) return run();
  Lock lock(state_mutex());
  stream->queue.push_back({std::move(run), what, std::move(accesses), delay_s});
  if (!stream->has_worker) {
    stream->has_worker = true;
    std::thread(run_tasks_of, stream).detach();
  }
  stream->work.notify_one();
}

void drain(Stream* stream) {
  Lock lock(state_mutex());
  wait_until_idle({stream}, lock);
}

void drain_all() {
  Lock lock(state_mutex());
  std::vector<Stream*> all;
  for (auto& [id, stream] : streams()) all.push_back(stream);
  wait_until_idle(all, lock);
}

double random_fraction(Stream* stream) {  // from a sequence per stream, so that other threads have no influence
  Lock lock(state_mutex());
  stream->random = stream->random * 1664525 + 1013904223;
  return (stream->random >> 8) / double(1 << 24);
}

std::string user_of(uintptr_t start, uintptr_t stop) {
  Lock lock(state_mutex());
  auto uses = [&](const Task& task) {
    for (auto& access : task.accesses)
      if (access.start < stop && start < access.stop) return true;
    return false;
  };
  for (auto& [id, stream] : streams()) {
    if (stream->running && uses(*stream->running)) return stream->running->what;
    for (auto& task : stream->queue)
      if (uses(task)) return task.what;
  }
  return "";
}

}  // namespace cuda_double

using namespace cuda_double;

extern "C" {

int cuda_double_is_async() { return settings().is_async; }
void cuda_double_enqueue(void* stream, const char* what, const Access* accesses, int num_accesses, void (*run)(void*), void* data) {
  enqueue(stream_of((cudaStream_t)stream), what, settings().kernel_delay_s, {accesses, accesses + num_accesses}, [=] { run(data); });
}
void cuda_double_touch(void* stream, const char* what, const Access* accesses, int num_accesses) {
  count("tasks");
  if (settings().finds_races) check_races(stream_of((cudaStream_t)stream), what, {accesses, accesses + num_accesses});
}
void cuda_double_drain(void* stream) { drain(stream_of((cudaStream_t)stream)); }
void cuda_double_drain_all() { drain_all(); }

// ---- streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int) {
  Lock lock(state_mutex());
  static unsigned last_id = 0;
  *handle = (cudaStream_t)new_stream(++last_id, current_device(), lock);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) { return cudaStreamCreateWithPriority(handle, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) { *priority = 0; return cudaSuccess; }

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  Lock lock(state_mutex());
  if (!stream->is_idle()) return fail(cudaErrorNotReady);
  host_learns(stream->clock, lock);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  auto* stream = stream_of(handle);
  count("blocking: cudaStreamSynchronize");
  tell("sync: cudaStreamSynchronize", 0, stream->id);
  drain(stream);
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  count("blocking: cudaDeviceSynchronize");
  tell("sync: cudaDeviceSynchronize", 0, 0);
  drain_all();
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* number) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (graph) *graph = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (number) *number = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  *mode = cudaStreamCaptureModeRelaxed;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  enqueue(stream_of(handle), "host function", 0, {}, [=] { function(data); });
  return cudaSuccess;
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t function, void* data, unsigned) {
  enqueue(stream_of(handle), "callback", 0, {}, [=] { function(handle, cudaSuccess, data); });
  return cudaSuccess;
}

// ---- events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  count("cudaEventCreate");
  *handle = (cudaEvent_t) new Event{flags, nullptr};
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  count("cudaEventDestroy");
  delete (Event*)handle;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream_handle, unsigned) {
  count("cudaEventRecord");
  auto* stream = stream_of(stream_handle);
  auto recording = std::make_shared<Recording>();
  {
    Lock lock(state_mutex());
    if (settings().finds_races) {
      stream_learns_from_host(stream, lock);
      recording->clock = stream->clock;
    }
    ((Event*)handle)->recording = recording;
  }
  enqueue(stream, "event", 0, {}, [=] {
    Lock lock(state_mutex());
    recording->is_done = true;
    recording->at_s = now_s();
    something_finished().notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream) { return cudaEventRecordWithFlags(handle, stream, 0); }

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  count("cudaStreamWaitEvent");
  auto* stream = stream_of(stream_handle);
  std::shared_ptr<Recording> recording;
  {
    Lock lock(state_mutex());
    recording = ((Event*)handle)->recording;
    if (recording) join(stream->clock, recording->clock);
  }
  if (!recording) return cudaSuccess;
  enqueue(stream, "wait", 0, {}, [=] {
    Lock lock(state_mutex());
    something_finished().wait(lock, [&] { return recording->is_done; });
  });
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  count("cudaEventQuery");
  Lock lock(state_mutex());
  auto& recording = ((Event*)handle)->recording;
  if (recording && !recording->is_done) return fail(cudaErrorNotReady);
  if (recording) host_learns(recording->clock, lock);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  auto* event = (Event*)handle;
  count("blocking: cudaEventSynchronize");
  if (!(event->flags & cudaEventBlockingSync)) count("cudaEventSynchronize that spins");
  tell("sync: cudaEventSynchronize", 0, 0);
  Lock lock(state_mutex());
  auto recording = event->recording;
  if (!recording) return cudaSuccess;
  if (!recording->is_done) count("blocking: cudaEventSynchronize that had to wait");
  something_finished().wait(lock, [&] { return recording->is_done; });
  host_learns(recording->clock, lock);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  auto *a = (Event*)from, *b = (Event*)to;
  Lock lock(state_mutex());
  if ((a->flags | b->flags) & cudaEventDisableTiming || !a->recording || !b->recording) return fail(cudaErrorInvalidResourceHandle);
  if (!a->recording->is_done || !b->recording->is_done) return fail(cudaErrorNotReady);
  *ms = (float)((b->recording->at_s - a->recording->at_s) * 1e3);
  return cudaSuccess;
}

}  // extern "C"
