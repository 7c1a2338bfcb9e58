// Vectors of floats as the compiler has them for this processor: sixteen where there are registers for that, else eight.

#pragma once

#include <cstdint>
#include <cstring>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
constexpr int ACCUMULATORS = 24;  // vectors of sums that fit into the registers beside operands
#else
constexpr int LANES = 8;
constexpr int ACCUMULATORS = 12;
#endif

template <int L>
struct Of {
    typedef float vec __attribute__((vector_size(4 * L), aligned(4), may_alias));
    typedef int32_t ints __attribute__((vector_size(4 * L), aligned(4), may_alias));
    typedef uint8_t bytes __attribute__((vector_size(L)));
};
typedef Of<LANES>::vec vec;
static_assert(alignof(Of<LANES>::vec) == 4, "vectors are loaded from anywhere");

template <int L = LANES>
inline typename Of<L>::vec load(const float* from) { return *reinterpret_cast<const typename Of<L>::vec*>(from); }
template <int L = LANES>
inline void store(float* to, typename Of<L>::vec value) { *reinterpret_cast<typename Of<L>::vec*>(to) = value; }
inline float sum_of(vec value) {
    float parts[LANES];
    std::memcpy(parts, &value, sizeof(value));
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) parts[i] += parts[i + width];
    return parts[0];
}
constexpr int least(int one, int other) { return one < other ? one : other; }

}  // namespace
