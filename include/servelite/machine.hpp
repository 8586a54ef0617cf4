// machine.hpp: threads and memory, as far as the standard library does not give them.
//
// Chapter: docs/architecture.md
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

#ifdef _OPENMP
  #include <omp.h>
  #define SERVELITE_OMP(what) _Pragma(#what)
#else
  #define SERVELITE_OMP(what)
#endif
#if defined(__unix__) || defined(__APPLE__)
  #define SERVELITE_POSIX 1
  #include <fcntl.h>
  #include <sys/mman.h>
  #include <unistd.h>
#endif

namespace servelite {

/// How many threads `threads = 0` (all cores) means; 1 without OpenMP.
inline int default_threads() {
#ifdef _OPENMP
  return omp_get_num_procs();
#else
  return 1;
#endif
}

/// Uninitialised memory for weights, shared by all copies of a matrix. Large pieces begin at a huge page and
/// ask for huge pages: a decode step reads all weights once, and with 4 KiB pages every 64th line is a TLB
/// miss.
inline std::shared_ptr<std::byte> allocate(size_t bytes) {
  constexpr size_t huge = size_t{2} << 20;
  const std::align_val_t alignment{bytes >= 2 * huge ? huge : 64};
  std::byte* p = static_cast<std::byte*>(::operator new(bytes, alignment));
#if defined(SERVELITE_POSIX) && defined(MADV_HUGEPAGE)
  if (bytes >= 2 * huge) ::madvise(p, bytes, MADV_HUGEPAGE);  // advice: a refusal does no harm
#endif
  return {p, [alignment](std::byte* q) { ::operator delete(q, alignment); }};
}

/// The file's bytes as the system pages them in, read only; nullptr where that cannot be had.
inline std::shared_ptr<std::byte> map_file([[maybe_unused]] const std::string& path,
                                           [[maybe_unused]] size_t bytes) {
#ifdef SERVELITE_POSIX
  const int file = ::open(path.c_str(), O_RDONLY);
  if (file < 0) return nullptr;
  void* p = bytes > 0 ? ::mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
  ::close(file);
  if (p != MAP_FAILED) return {static_cast<std::byte*>(p), [bytes](std::byte* q) { ::munmap(q, bytes); }};
#endif
  return nullptr;
}

/// Gives back the memory of a mapped file's bytes that are not needed again soon (whole pages only).
inline void forget_mapped([[maybe_unused]] const std::byte* first, [[maybe_unused]] size_t bytes) {
#ifdef SERVELITE_POSIX
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t from = (reinterpret_cast<uintptr_t>(first) + page - 1) / page * page;
  const uintptr_t to = (reinterpret_cast<uintptr_t>(first) + bytes) / page * page;
  if (to > from) ::madvise(reinterpret_cast<void*>(from), to - from, MADV_DONTNEED);
#endif
}

}  // namespace servelite
