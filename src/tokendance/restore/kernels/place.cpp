// Gather, rotate and scatter rows of one layer in one pass over memory; see kernels/base.py.
// Plain C ABI, loaded with ctypes: no torch headers, so it builds in a second and fits any torch.
#include <cstdint>
#include <cstring>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace {

struct BF16 {
  uint16_t bits;
  static inline float load(BF16 x) {
    uint32_t u = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
  }
  static inline BF16 store(float f) {
    uint32_t u;
    std::memcpy(&u, &f, 4);
    // A nan here has the payload of a bfloat16, low half zero, so that rounding leaves it a nan.
    return BF16{uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
};

struct F16 {
  _Float16 value;
  static inline float load(F16 x) { return float(x.value); }
  static inline F16 store(float f) { return F16{_Float16(f)}; }
};

struct F32 {
  float value;
  static inline float load(F32 x) { return x.value; }
  static inline F32 store(float f) { return F32{f}; }
};

struct Plane {
  char* out;            // first byte of the paged plane
  int64_t head_stride;  // bytes between heads of a target row
  const char* master;   // rows [0, master_rows), contiguous
  const char* own;      // rows that `source` numbers from master_rows on, contiguous
  const int64_t* offsets;  // bytes from `out` to each target row
};

struct Turn {
  const int32_t* which;  // per row: line of cos/sin, 0 keeps the row's bits; null rotates nothing
  const float* cos;
  const float* sin;
  int64_t half;
  int64_t interleaved;
};

// One product rounded, the other fused: what torch's addcmul does, so that the bits are the same.
inline float turn(float a, float cos, float b, float sin) { return __builtin_fmaf(b, sin, a * cos); }

template <typename T>
inline void rotate_head(const T* __restrict x, T* __restrict y, const float* __restrict cos,
                        const float* __restrict sin, int64_t half, int64_t dim, bool interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      float a = T::load(x[2 * i]), b = T::load(x[2 * i + 1]);
      y[2 * i] = T::store(turn(a, cos[i], -b, sin[i]));
      y[2 * i + 1] = T::store(turn(b, cos[i], a, sin[i]));
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      float a = T::load(x[i]), b = T::load(x[i + half]);
      y[i] = T::store(turn(a, cos[i], -b, sin[i]));
      y[i + half] = T::store(turn(b, cos[i], a, sin[i]));
    }
  }
  if (2 * half < dim) std::memcpy(y + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(T));
}

struct Work {
  Plane planes[2];  // K, or K and V; only the first is rotated
  int64_t count;
  const int64_t* source;
  int64_t master_rows;
  int64_t heads;
  int64_t dim;
  Turn turn;
  int64_t kind;    // 0 bfloat16, 1 float16, 2 float32
  int64_t stream;  // write past the caches
};

constexpr int64_t kMaxHead = 4096;  // bytes of one head

// Large writes go past the caches, as in a large memcpy: a plain store would first read the line that
// it overwrites, half as much traffic again.
inline void emit(char* to, const char* from, int64_t bytes, bool stream) {
#if defined(__AVX__)
  if (stream && bytes % 32 == 0 && reinterpret_cast<uintptr_t>(to) % 32 == 0) {
    for (int64_t i = 0; i < bytes; i += 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    return;
  }
#endif
  std::memcpy(to, from, bytes);
}

template <typename T>
inline void place_row(const Plane& plane, int64_t offset, int64_t source, const Work& w,
                      int32_t line) {
  const int64_t heads = w.heads, dim = w.dim, bytes = dim * int64_t(sizeof(T));
  const char* from = source < w.master_rows ? plane.master + source * heads * bytes
                                            : plane.own + (source - w.master_rows) * heads * bytes;
  char* to = plane.out + offset;
  if (line == 0) {
    if (plane.head_stride == bytes) {
      emit(to, from, heads * bytes, w.stream != 0);
      return;
    }
    for (int64_t h = 0; h < heads; ++h)
      emit(to + h * plane.head_stride, from + h * bytes, bytes, w.stream != 0);
    return;
  }
  const Turn& turn = w.turn;
  const float* cos = turn.cos + line * turn.half;
  const float* sin = turn.sin + line * turn.half;
  alignas(64) char turned[kMaxHead];
  for (int64_t h = 0; h < heads; ++h) {
    rotate_head(reinterpret_cast<const T*>(from + h * bytes), reinterpret_cast<T*>(turned), cos, sin,
                turn.half, dim, turn.interleaved != 0);
    emit(to + h * plane.head_stride, turned, bytes, w.stream != 0);
  }
}

template <typename T>
void place(const Work& w, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const int32_t line = w.turn.which == nullptr ? 0 : w.turn.which[r];
    place_row<T>(w.planes[0], w.planes[0].offsets[r], w.source[r], w, line);
    if (w.count == 2) place_row<T>(w.planes[1], w.planes[1].offsets[r], w.source[r], w, 0);
  }
#if defined(__AVX__)
  if (w.stream) _mm_sfence();
#endif
}

}  // namespace

// Rows [begin, end) of one layer.
extern "C" void tokendance_place(const Work* work, int64_t begin, int64_t end) {
  if (work->kind == 0) place<BF16>(*work, begin, end);
  if (work->kind == 1) place<F16>(*work, begin, end);
  if (work->kind == 2) place<F32>(*work, begin, end);
}
