// Finds unordered accesses, whatever their timing was: two tasks touch the same bytes, one of them writes, and no chain of
// events, waits and synchronizations leads from one to the other. Each stream and the host have a vector clock. All host
// threads count as one thread in the order of the calls, because locks and queues between them are not seen.
#include <cstdio>
#include <set>

#include "runtime.h"

namespace cuda_double {
namespace {

struct Touch {
  unsigned clock_index = 0;  // of the stream, or 0 for none
  unsigned long number = 0;  // of the task within the stream
  const char* what = "";
  unsigned stream = 0;
  bool is_poison = false;
};

struct History {  // of a range of bytes, up to `stop`
  uintptr_t stop;
  Touch writer;
  std::vector<Touch> readers;  // since that write, at most one per stream
};

using Ranges = std::map<uintptr_t, History>;  // by the start of the range; they never overlap

Ranges& ranges() {
  static auto* all = new Ranges;
  return *all;
}

Clock& host_clock() {
  static auto* clock = new Clock;
  return *clock;
}

const char* interned(const char* text) {
  static auto* all = new std::set<std::string>;
  return all->insert(text).first->c_str();
}

// Splits the range across `at`, if any. Returns the first range that begins at or after `at`.
Ranges::iterator split(uintptr_t at) {
  auto next = ranges().lower_bound(at);
  if (next == ranges().begin()) return next;
  auto before = std::prev(next);
  if (before->second.stop <= at) return next;
  History rest = before->second;
  before->second.stop = at;
  return ranges().emplace(at, std::move(rest)).first;
}

// Calls `visit(history)` for each range in [start, stop). Untouched bytes get a new range.
template <class Visit>
void for_each_range(uintptr_t start, uintptr_t stop, Visit visit) {
  split(stop);
  auto range = split(start);
  for (uintptr_t at = start; at < stop; ++range) {
    if (range == ranges().end() || range->first > at) {
      uintptr_t end = range == ranges().end() || range->first > stop ? stop : range->first;
      range = ranges().emplace(at, History{end, {}, {}}).first;
    }
    visit(range->second);
    at = range->second.stop;
  }
}

bool is_before(const Touch& touch, const Clock& clock) {
  return !touch.clock_index || (touch.clock_index < clock.size() && touch.number <= clock[touch.clock_index]);
}

void remember_reader(History& history, const Touch& reader) {
  for (auto& known : history.readers)
    if (known.clock_index == reader.clock_index) {
      known = reader;
      return;
    }
  history.readers.push_back(reader);
}

std::string worded(const Touch& touch, bool writes, const Touch& other, bool wrote) {
  char text[500];
  snprintf(text, sizeof text, "race: \"%.150s\" on stream %u %s what \"%.150s\" on stream %u %s, and nothing orders them", touch.what, touch.stream,
           writes ? "writes" : "reads", other.what, other.stream, wrote ? "wrote" : "reads");
  return text;
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); i++)
    if (other[i] > clock[i]) clock[i] = other[i];
}

unsigned new_clock_index(const Lock&) {
  static unsigned last = 0;
  return ++last;
}

void check_races(Stream* stream, const char* what, const std::vector<Access>& accesses, bool is_poison) {
  std::vector<std::string> found;
  {
    Lock lock(state_mutex());
    stream_learns_from_host(stream, lock);
    if (stream->clock.size() <= stream->clock_index) stream->clock.resize(stream->clock_index + 1);
    const Touch touch{stream->clock_index, ++stream->clock[stream->clock_index], interned(what), stream->id, is_poison};
    auto check = [&](const Touch& other, bool writes, bool wrote) {
      if (!is_before(other, stream->clock)) found.push_back(worded(touch, writes, other, wrote));
    };
    for (auto& access : accesses) {  // reads come first, because a task may write the bytes it reads
      if (access.writes || access.start >= access.stop) continue;
      bool is_all_poison = true;
      for_each_range(access.start, access.stop, [&](History& history) {
        check(history.writer, false, true);
        is_all_poison &= history.writer.is_poison;
        remember_reader(history, touch);
      });
      if (is_all_poison) found.push_back("poison read: \"" + std::string(what) + "\" reads memory that was given back, and nothing has written it since");
    }
    for (auto& access : accesses) {
      if (!access.writes || access.start >= access.stop) continue;
      for_each_range(access.start, access.stop, [&](History& history) {
        check(history.writer, true, true);
        for (auto& reader : history.readers) check(reader, true, false);
        history.writer = touch;
        history.readers.clear();
      });
    }
  }
  for (auto& text : found) report_violation("%s", text.c_str());
}

void host_learns(const Clock& clock, const Lock&) {
  if (settings().finds_races) join(host_clock(), clock);
}

void stream_learns_from_host(Stream* stream, const Lock&) { join(stream->clock, host_clock()); }

void forget_accesses(uintptr_t start, uintptr_t stop, const Lock&) {
  if (!settings().finds_races) return;
  split(stop);
  for (auto range = split(start); range != ranges().end() && range->first < stop;) range = ranges().erase(range);
}

}  // namespace cuda_double
