// A convolution, max pooling and ReLU as one step, forward and backward, for images whose channels come last. Windows of pooling lie two
// apart: 2x2, or 3x3 with a border of one, which overlap.
//
// Forward, the values of a window stay in registers until the largest is known. Backward, only that one has a gradient, and only if
// ReLU let it pass: an eighth or so of the products of a general convolution is left, on rows of pixels that are contiguous. Those
// rows are taken in whole vectors, so that inputs must have LANES - 1 more floats behind them that may be read (or, for gradients of
// inputs, written).
//
// How many channels lie between neighbouring pixels is known to the compiler for the networks that papers train: two dozen places of an
// image that differ by numbers need a register each otherwise, and there are sixteen.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int FEW = 4;      // channels up to which columns, and not outputs, are taken side by side
constexpr int FEWEST = 2;   // outputs that are left over for which a vector would be mostly empty
constexpr uint8_t CUT = 9;  // what `which` says where ReLU let nothing pass

struct Shape {
    int samples, height, width, channels, outputs, kernel, pool, relu;
    int margin;  // the border that what is pooled, and its gradient, lie in
    int map_rows() const { return height - kernel + 1; }  // of the convolution
    int map_columns() const { return width - kernel + 1; }
    int border() const { return pool - 2; }  // of pooling
    int rows() const { return (map_rows() + border()) / 2; }
    int columns() const { return (map_columns() + border()) / 2; }
    int row() const { return kernel * channels; }  // floats of a kernel's row
    int taps() const { return kernel * row(); }
    long line() const { return long(width) * channels; }
    long image() const { return height * line(); }
    long pooled() const { return long(rows() + 2 * margin) * (columns() + 2 * margin) * outputs; }
    long window(int r, int c) const { return (long(r + margin) * (columns() + 2 * margin) + c + margin) * outputs; }
    long weights() const { return long(outputs) * taps(); }
};

// --- forward ---------------------------------------------------------------------------------------------------------------------

// The largest of the values of windows, the first of equal ones, as torch has it; NaN passes. And which of them it is.
template <int L>
struct Largest {
    typename Of<L>::vec best = {};
    typename Of<L>::ints place = {};

    inline void start(typename Of<L>::vec value, int32_t q) {
        best = value;
        place = typename Of<L>::ints{} + q;
    }

    inline void take(typename Of<L>::vec value, int32_t q) {
        const typename Of<L>::ints better = (value > best) | (value != value);
        best = better ? value : best;
        place = better ? typename Of<L>::ints{} + q : place;
    }

    // The largest of others, whose places begin at `first`.
    inline void take(const Largest& others, int32_t first) {
        const typename Of<L>::ints better = (others.best > best) | (others.best != others.best);
        best = better ? others.best : best;
        place = better ? others.place + first : place;
    }

    // The first `count` of them, each `apart` from the next.
    inline void write(typename Of<L>::vec bias, bool relu, int count, long apart, float* out, uint8_t* which) {
        best += bias;
        if (relu) {
            const typename Of<L>::ints cut = best <= 0.0f;
            best = cut ? typename Of<L>::vec{} : best;
            place = cut ? typename Of<L>::ints{} + int32_t(CUT) : place;
        }
        const auto places = __builtin_convertvector(place, typename Of<L>::bytes);
        if (apart == 1 && count == L) {
            store<L>(out, best);
            std::memcpy(which, &places, L);
            return;
        }
        float values[L];
        uint8_t of_values[L];
        std::memcpy(values, &best, sizeof(best));
        std::memcpy(of_values, &places, L);
        for (int i = 0; i < count; i++) out[i * apart] = values[i];
        for (int i = 0; i < count; i++) which[i * apart] = of_values[i];
    }
};

template <int L>
inline Largest<L> largest_of_four(const typename Of<L>::vec (&values)[4]) {
    Largest<L> found;
    found.start(values[0], 0);
    for (int32_t q = 1; q < 4; q++) found.take(values[q], q);
    return found;
}

// Outputs side by side: P windows beside each other, of L outputs each. C channels, or as many as the shape says if it is 0.
template <int C, int L, int P>
inline void windows(const Shape& s, const float* x, const float* packed, const float* bias, float* out, uint8_t* which, int outputs) {
    typedef typename Of<L>::vec vec;
    vec sums[P][4] = {};
    const int next = C ? C : s.channels, taps = s.kernel * next;
    for (int i = 0; i < s.kernel; i++) {
        const float *above = x + i * s.line(), *below = above + s.line();
        for (int t = 0; t < taps; t++, packed += L) {
            const vec weight = load<L>(packed);
            for (int p = 0; p < P; p++) {
                const int at = t + 2 * p * next;
                sums[p][0] += above[at] * weight;
                sums[p][1] += above[at + next] * weight;
                sums[p][2] += below[at] * weight;
                sums[p][3] += below[at + next] * weight;
            }
        }
    }
    for (int p = 0; p < P; p++, out += s.outputs, which += s.outputs)
        largest_of_four<L>(sums[p]).write(load<L>(bias), s.relu, outputs, 1, out, which);
}

// The windows of one row, as many at once as registers allow.
template <int C, int L, int P = ACCUMULATORS / 4>
inline void row_of_windows(const Shape& s, int count, const float* x, const float* packed, const float* bias, float* out,
                           uint8_t* which, int outputs) {
    for (; count >= P; count -= P, x += 2 * P * s.channels, out += P * s.outputs, which += P * s.outputs)
        windows<C, L, P>(s, x, packed, bias, out, which, outputs);
    if constexpr (P > 1) row_of_windows<C, L, P - 1>(s, count, x, packed, bias, out, which, outputs);
}

// P values of the convolution beside each other, of L outputs each.
template <int C, int L, int P>
inline void values(const Shape& s, const float* x, const float* packed, float* map) {
    typename Of<L>::vec sums[P] = {};
    const int next = C ? C : s.channels, taps = s.kernel * next;
    for (int i = 0; i < s.kernel; i++)
        for (int t = 0; t < taps; t++, packed += L) {
            const typename Of<L>::vec weight = load<L>(packed);
            for (int p = 0; p < P; p++) sums[p] += x[i * s.line() + t + p * next] * weight;
        }
    for (int p = 0; p < P; p++) store<L>(map + p * L, sums[p]);
}

template <int C, int L, int P = LANES>
inline void row_of_values(const Shape& s, int count, const float* x, const float* packed, float* map) {
    for (; count >= P; count -= P, x += P * s.channels, map += P * L) values<C, L, P>(s, x, packed, map);
    if constexpr (P > 1) row_of_values<C, L, P / 2>(s, count, x, packed, map);
}

// The largest of up to three vectors that follow each other, from `first` to before `last` of them.
template <int L>
inline Largest<L> largest_of_three(const float* values, int first, int last) {
    Largest<L> found;
    found.start(load<L>(values + first * L), first);
    if (first == 0 && last == 3) {
        found.take(load<L>(values + L), 1);
        found.take(load<L>(values + 2 * L), 2);
    } else
        for (int j = first + 1; j < last; j++) found.take(load<L>(values + j * L), j);
    return found;
}

// Windows of 3x3 of one image, which overlap: every value is computed once, and the largest of three beside each other is found once
// for the windows above and below.
template <int C, int L>
void overlapping(const Shape& s, const float* x, const float* packed, const float* bias, float* row, Largest<L>* across, float* out,
                 uint8_t* which, int outputs) {
    const int height = s.map_rows(), width = s.map_columns(), columns = s.columns();
    for (int y = 0; y < height; y++) {
        row_of_values<C, L>(s, width, x + y * s.line(), packed, row);
        for (int c = 0; c < columns; c++)
            across[y * columns + c] = largest_of_three<L>(row + (2L * c - 1) * L, c ? 0 : 1, least(3, width - 2 * c + 1));
    }
    for (int r = 0; r < s.rows(); r++)
        for (int c = 0; c < columns; c++) {
            const int first = r ? 0 : 1, last = least(3, height - 2 * r + 1);
            const Largest<L>* rows = across + (2L * r - 1) * columns + c;
            Largest<L> found = rows[first * columns];
            found.place += first * s.pool;
            for (int i = first + 1; i < last; i++) found.take(rows[i * columns], i * s.pool);
            const long at = s.window(r, c);
            found.write(load<L>(bias), s.relu, outputs, 1, out + at, which + at);
        }
}

// L outputs from `start` on, of all samples.
template <int C, int L>
void some_outputs(const Shape& s, int start, const float* x, const float* weight, const float* bias, float* out, uint8_t* which) {
    const int outputs = least(L, s.outputs - start), taps = s.taps();
    std::vector<float> packed(size_t(taps) * L);  // tap by tap
    float biases[L] = {};
    for (int o = 0; o < outputs; o++) {
        const float* from = weight + long(start + o) * taps;
        for (int t = 0; t < taps; t++) packed[size_t(t) * L + o] = from[t];
        biases[o] = bias[start + o];
    }
    std::vector<float> row(s.border() ? size_t(s.map_columns()) * L : 0);  // of the convolution
    std::vector<Largest<L>> across(s.border() ? size_t(s.map_rows()) * s.columns() : 0);
    for (int n = 0; n < s.samples; n++) {
        const float* image = x + n * s.image();
        float* of_image = out + n * s.pooled() + start;
        uint8_t* places = which + n * s.pooled() + start;
        if (s.border()) {
            overlapping<C, L>(s, image, packed.data(), biases, row.data(), across.data(), of_image, places, outputs);
            continue;
        }
        for (int r = 0; r < s.rows(); r++) {
            const long at = s.window(r, 0);
            row_of_windows<C, L>(s, s.columns(), image + 2 * r * s.line(), packed.data(), biases, of_image + at, places + at, outputs);
        }
    }
}

// B outputs from `start` on where that many are left over: numbers of a patch side by side, instead of outputs.
template <int B>
void last_outputs(const Shape& s, int start, const float* x, const float* weight, const float* bias, float* out, uint8_t* which) {
    const int taps = s.row(), whole = taps / LANES * LANES;
    float biases[LANES] = {};
    std::memcpy(biases, bias + start, sizeof(float) * B);
    for (int n = 0; n < s.samples; n++)
        for (int r = 0; r < s.rows(); r++)
            for (int c = 0; c < s.columns(); c++) {
                vec sums[B][4] = {};
                float rest[4][LANES] = {};
                for (int i = 0; i < s.kernel; i++) {
                    const float* first = x + n * s.image() + (2 * r + i) * s.line() + 2L * c * s.channels;
                    const float* patches[4] = {first, first + s.channels, first + s.line(), first + s.line() + s.channels};
                    const float* kernel = weight + long(start) * s.taps() + long(i) * taps;
                    for (int t = 0; t < whole; t += LANES)
                        for (int b = 0; b < B; b++)
                            for (int q = 0; q < 4; q++) sums[b][q] += load(patches[q] + t) * load(kernel + b * s.taps() + t);
                    for (int t = whole; t < taps; t++)
                        for (int b = 0; b < B; b++)
                            for (int q = 0; q < 4; q++) rest[q][b] += patches[q][t] * kernel[b * s.taps() + t];
                }
                const long at = n * s.pooled() + s.window(r, c) + start;
                for (int b = 0; b < B; b++)
                    for (int q = 0; q < 4; q++) rest[q][b] += sum_of(sums[b][q]);
                const vec of[4] = {load(rest[0]), load(rest[1]), load(rest[2]), load(rest[3])};
                largest_of_four<LANES>(of).write(load(biases), s.relu, B, 1, out + at, which + at);
            }
}

template <int C>
void forward_by_outputs(const Shape& s, const float* x, const float* weight, const float* bias, float* out, uint8_t* which) {
    int start = 0;
    for (; s.outputs - start > 8; start += LANES) some_outputs<C, LANES>(s, start, x, weight, bias, out, which);
    const int left = s.outputs - start;
    if (left > FEWEST || (left > 0 && s.border())) some_outputs<C, 8>(s, start, x, weight, bias, out, which);
    else if (left == 2) last_outputs<2>(s, start, x, weight, bias, out, which);
    else if (left == 1) last_outputs<1>(s, start, x, weight, bias, out, which);
}

// By outputs, with the numbers of channels that the networks of papers have, at their width or a quarter of it, known to the compiler.
auto forward_with(int channels) {
    switch (channels) {
        case 3: return forward_by_outputs<3>;
        case 6: return forward_by_outputs<6>;
        case 16: return forward_by_outputs<16>;
        case 20: return forward_by_outputs<20>;
        case 64: return forward_by_outputs<64>;
        default: return forward_by_outputs<0>;
    }
}

// Columns side by side: two vectors of two lines, of B outputs; what each has, in `sums`.
template <int B>
inline void two_lines(const Shape& s, const float* planes, const float* packed, float (*sums)[2][2 * LANES]) {
    vec sum[B][2][2] = {};
    for (int c = 0; c < s.channels; c++)
        for (int i = 0; i < s.kernel; i++) {
            const float *above = planes + (long(c) * s.height + i) * s.width, *below = above + s.width;
            for (int j = 0; j < s.kernel; j++, packed += B) {
                const vec values[2][2] = {{load(above + j), load(above + j + LANES)}, {load(below + j), load(below + j + LANES)}};
                for (int b = 0; b < B; b++)
                    for (int l = 0; l < 2; l++)
                        for (int v = 0; v < 2; v++) sum[b][l][v] += packed[b] * values[l][v];
            }
        }
    for (int b = 0; b < B; b++)
        for (int l = 0; l < 2; l++)
            for (int v = 0; v < 2; v++) store(&sums[b][l][v * LANES], sum[b][l][v]);
}

// Up to LANES windows of one row, of B outputs from `start` on.
template <int B>
inline void windows_of(const Shape& s, int start, int count, const float* planes, const float* packed, const float* bias, float* out,
                       uint8_t* which) {
    float sums[B][2][2 * LANES];
    two_lines<B>(s, planes, packed, sums);
    for (int b = 0; b < B; b++) {
        float quarters[4][LANES];
        for (int q = 0; q < 4; q++)
            for (int c = 0; c < LANES; c++) quarters[q][c] = sums[b][q / 2][2 * c + q % 2];
        const vec of[4] = {load(quarters[0]), load(quarters[1]), load(quarters[2]), load(quarters[3])};
        largest_of_four<LANES>(of).write(vec{} + bias[start + b], s.relu, count, s.outputs, out + start + b, which + start + b);
    }
}

// `block` outputs from `start` on; the first template argument is the most that there can be.
template <int B = ACCUMULATORS / 4>
inline void windows_of_block(const Shape& s, int start, int block, int count, const float* planes, const float* packed,
                             const float* bias, float* out, uint8_t* which) {
    if (block == B) return windows_of<B>(s, start, count, planes, packed, bias, out, which);
    if constexpr (B > 1) windows_of_block<B - 1>(s, start, block, count, planes, packed, bias, out, which);
}

// An image whose channels come last as planes; the number of channels is known where it matters.
void split(const float* __restrict image, int channels, long pixels, float* __restrict planes) {
    if (channels == 1) std::memcpy(planes, image, sizeof(float) * pixels);
    else if (channels == 3)
        for (long p = 0; p < pixels; p++)
            for (int c = 0; c < 3; c++) planes[c * pixels + p] = image[3 * p + c];
    else
        for (int c = 0; c < channels; c++)
            for (long p = 0; p < pixels; p++) planes[c * pixels + p] = image[p * channels + c];
}

void forward_by_columns(const Shape& s, const float* x, const float* weight, const float* bias, float* out, uint8_t* which) {
    constexpr int MOST = ACCUMULATORS / 4;
    const int blocks = (s.outputs + MOST - 1) / MOST, block = blocks ? (s.outputs + blocks - 1) / blocks : 0;
    std::vector<float> packed;  // block by block, tap by tap
    for (int start = 0; start < s.outputs; start += block)
        for (int c = 0; c < s.channels; c++)
            for (int t = 0; t < s.kernel * s.kernel; t++)
                for (int o = start; o < least(start + block, s.outputs); o++)
                    packed.push_back(weight[long(o) * s.taps() + long(t) * s.channels + c]);
    std::vector<float> planes(s.image() + 2 * LANES);  // of one image
    for (int n = 0; n < s.samples; n++) {
        const float* image = x + n * s.image();
        split(image, s.channels, long(s.height) * s.width, planes.data());
        for (int r = 0; r < s.rows(); r++)
            for (int c = 0; c < s.columns(); c += LANES) {
                const long at = n * s.pooled() + s.window(r, c);
                for (int start = 0; start < s.outputs; start += block)
                    windows_of_block(s, start, least(block, s.outputs - start), least(LANES, s.columns() - c),
                                     &planes[2L * r * s.width + 2 * c], &packed[size_t(start) * s.taps()], bias, out + at, which + at);
            }
    }
}

// --- backward --------------------------------------------------------------------------------------------------------------------

// For weights, patches lie anywhere, and a shorter vector crosses the border of a cache line less often.
constexpr int WIDTH = 8;
constexpr int WIDEST = 8;  // vectors of a row that one pass takes
constexpr int up(int count, int unit) { return (count + unit - 1) / unit * unit; }

struct Gradient {  // of one value of the convolution that has one
    int32_t pixel;  // where its patch starts
    float value;
};

// Adds to R vectors of each of G rows of a kernel what all gradients of one output give.
template <int R, int G>
void add_rows(const Gradient* from, int count, const float* x, int channels, long line, float* sums, int stride) {
    Of<WIDTH>::vec sum[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) sum[g][r] = load<WIDTH>(sums + g * stride + r * WIDTH);
    for (int i = 0; i < count; i++) {
        const float* patch = x + long(from[i].pixel) * channels;
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++) sum[g][r] += from[i].value * load<WIDTH>(patch + g * line + r * WIDTH);
    }
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) store<WIDTH>(sums + g * stride + r * WIDTH, sum[g][r]);
}

template <int R, int G>
void add_kernel(const Shape& s, const Gradient* from, int count, const float* x, float* sums, int stride) {
    const long line = s.line();
    int i = 0;
    for (; i + G <= s.kernel; i += G) add_rows<R, G>(from, count, x + i * line, s.channels, line, sums + i * stride, stride);
    for (; i < s.kernel; i++) add_rows<R, 1>(from, count, x + i * line, s.channels, line, sums + i * stride, stride);
}

void add_weights(const Shape& s, const Gradient* from, int count, const float* x, float* sums, int stride) {
    for (int start = 0; start < stride; start += WIDEST * WIDTH) {
        const float* part = x + start;
        float* to = sums + start;
        switch (least((stride - start) / WIDTH, WIDEST)) {
            case 1: add_kernel<1, 5>(s, from, count, part, to, stride); break;
            case 2: add_kernel<2, 5>(s, from, count, part, to, stride); break;
            case 3: add_kernel<3, 4>(s, from, count, part, to, stride); break;
            case 4: add_kernel<4, 3>(s, from, count, part, to, stride); break;
            case 5: add_kernel<5, 2>(s, from, count, part, to, stride); break;
            case 6: add_kernel<6, 2>(s, from, count, part, to, stride); break;
            case 7: add_kernel<7, 1>(s, from, count, part, to, stride); break;
            default: add_kernel<8, 1>(s, from, count, part, to, stride);
        }
    }
}

// The gradients of one image in the order of the pixels where their patches start: each patch is then read and written once.
struct ByPixel {
    struct Part {
        const float* row;  // of its output's kernel
        float value;
    };
    std::vector<int32_t> ends;  // of each pixel's parts
    std::vector<Part> parts;

    ByPixel(const Shape& s) : ends(s.height * s.width + 1), parts(s.outputs * s.rows() * s.columns()) {}

    // `lists` holds, for every output, `most` gradients at most, of which `counts` says how many there are.
    void sort(const Shape& s, const Gradient* lists, int most, const int* counts, const float* rows, long kernel) {
        std::fill(ends.begin(), ends.end(), 0);
        for (int o = 0; o < s.outputs; o++)
            for (int i = 0; i < counts[o]; i++) ends[lists[long(o) * most + i].pixel + 1]++;
        for (size_t p = 1; p < ends.size(); p++) ends[p] += ends[p - 1];
        for (int o = 0; o < s.outputs; o++)
            for (int i = 0; i < counts[o]; i++) {
                const Gradient& of = lists[long(o) * most + i];
                parts[ends[of.pixel]++] = {rows + o * kernel, of.value};
            }
    }
};

// Adds to R vectors of each of G rows of every patch what the gradients of its pixel give.
template <int R, int G>
void add_patches(const Shape& s, const ByPixel& sorted, long row, int stride, float* grad_x) {
    const long line = s.line();
    const int pixels = s.height * s.width;
    for (int p = 0, i = 0; p < pixels; p++) {
        const int end = sorted.ends[p];
        if (i == end) continue;
        float* to = grad_x + long(p) * s.channels;
        vec sum[G][R];
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++) sum[g][r] = load(to + g * line + r * LANES);
        for (; i < end; i++) {
            const float* from = sorted.parts[i].row + row;
            for (int g = 0; g < G; g++)
                for (int r = 0; r < R; r++) sum[g][r] += sorted.parts[i].value * load(from + g * stride + r * LANES);
        }
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++) store(to + g * line + r * LANES, sum[g][r]);
    }
}

// The same of all rows, as many at once as registers allow.
template <int R>
void add_rows_of_patches(const Shape& s, const ByPixel& sorted, int start, int stride, float* grad_x) {
    constexpr int G = ACCUMULATORS / R < 5 ? ACCUMULATORS / R : 5;
    int k = 0;
    for (; k + G <= s.kernel; k += G) add_patches<R, G>(s, sorted, long(k) * stride + start, stride, grad_x + k * s.line() + start);
    for (; k < s.kernel; k++) add_patches<R, 1>(s, sorted, long(k) * stride + start, stride, grad_x + k * s.line() + start);
}

void add_inputs(const Shape& s, const ByPixel& sorted, int stride, float* grad_x) {
    for (int start = 0; start < stride; start += WIDEST * LANES)
        switch (least((stride - start) / LANES, WIDEST)) {
            case 1: add_rows_of_patches<1>(s, sorted, start, stride, grad_x); break;
            case 2: add_rows_of_patches<2>(s, sorted, start, stride, grad_x); break;
            case 3: add_rows_of_patches<3>(s, sorted, start, stride, grad_x); break;
            case 4: add_rows_of_patches<4>(s, sorted, start, stride, grad_x); break;
            case 5: add_rows_of_patches<5>(s, sorted, start, stride, grad_x); break;
            case 6: add_rows_of_patches<6>(s, sorted, start, stride, grad_x); break;
            case 7: add_rows_of_patches<7>(s, sorted, start, stride, grad_x); break;
            default: add_rows_of_patches<WIDEST>(s, sorted, start, stride, grad_x);
        }
}

void backward(const Shape& s, const float* x, const float* weight, const float* grad, const uint8_t* which, float* grad_weight,
              float* grad_bias, float* grad_x) {
    const int windows = s.rows() * s.columns(), kernels = s.outputs * s.kernel;
    const int stride = up(s.row(), WIDTH), wide = up(s.row(), LANES);  // rows of kernels as whole vectors
    std::vector<float> sums(size_t(kernels) * stride), rows(grad_x ? size_t(kernels) * wide : 0);
    if (grad_x)
        for (long r = 0; r < kernels; r++) std::memcpy(&rows[r * wide], weight + r * s.row(), sizeof(float) * s.row());
    int32_t places[CUT + 1] = {};
    for (int q = 0; q < s.pool * s.pool; q++) places[q] = q / s.pool * s.width + q % s.pool;
    std::vector<int32_t> corners(windows);  // pixels
    std::vector<long> at(windows);          // in what is pooled
    for (int w = 0; w < windows; w++) {
        const int r = w / s.columns(), c = w % s.columns();
        corners[w] = (2 * r - s.border()) * s.width + 2 * c - s.border();
        at[w] = s.window(r, c);
    }
    std::vector<Gradient> lists(size_t(s.outputs) * windows + 1);
    std::vector<int> counts(s.outputs);
    ByPixel sorted(s);
    std::memset(grad_bias, 0, sizeof(float) * s.outputs);
    if (grad_x) std::memset(grad_x, 0, sizeof(float) * s.samples * s.image());
    for (int n = 0; n < s.samples; n++) {
        for (int o = 0; o < s.outputs; o++) {
            const float* of_output = grad + n * s.pooled() + o;
            const uint8_t* of_places = which + n * s.pooled() + o;
            Gradient* found = &lists[size_t(o) * windows];
            int count = 0;
            float total = 0;
            for (int w = 0; w < windows; w++) {
                const float value = of_output[at[w]];
                const uint8_t place = of_places[at[w]];
                found[count] = {corners[w] + places[place], value};
                const bool passed = place != CUT;
                total += passed ? value : 0.0f;
                count += passed;
            }
            counts[o] = count;
            grad_bias[o] += total;
            add_weights(s, found, count, x + n * s.image(), &sums[size_t(o) * s.kernel * stride], stride);
        }
        if (!grad_x) continue;
        sorted.sort(s, lists.data(), windows, counts.data(), rows.data(), long(s.kernel) * wide);
        add_inputs(s, sorted, wide, grad_x + n * s.image());
    }
    for (long r = 0; r < kernels; r++) std::memcpy(grad_weight + r * s.row(), &sums[r * stride], sizeof(float) * s.row());
}

}  // namespace

extern "C" {

// Chosen images, channels last, inside a border that is left as it is.
void gather(const float* images, const int64_t* chosen, int count, int channels, int height, int width, int border, float* out) {
    const long line = long(width + 2 * border) * channels, image = (height + 2 * border) * line, plane = long(height) * width;
    for (int n = 0; n < count; n++)
        for (int h = 0; h < height; h++) {
            const float* from = images + chosen[n] * channels * plane + long(h) * width;
            float* to = out + n * image + (h + border) * line + border * channels;
            if (channels == 1) std::memcpy(to, from, sizeof(float) * width);
            else if (channels == 3)
                for (int w = 0; w < width; w++)
                    for (int c = 0; c < 3; c++) to[w * 3 + c] = from[c * plane + w];
            else
                for (int c = 0; c < channels; c++)
                    for (int w = 0; w < width; w++) to[w * channels + c] = from[c * plane + w];
        }
}

// Of several networks, one after the other; `shared` says that all have the same inputs.
void pooled_forward(int networks, int shared, Shape s, const float* x, const float* weight, const float* bias, float* out,
                    uint8_t* which) {
    const auto forward = s.channels <= FEW && !s.border() ? forward_by_columns : forward_with(s.channels);
    for (long k = 0; k < networks; k++)
        forward(s, x + (shared ? 0 : k * s.samples * s.image()), weight + k * s.weights(), bias + k * s.outputs,
                out + k * s.samples * s.pooled(), which + k * s.samples * s.pooled());
}

void pooled_backward(int networks, int shared, Shape s, const float* x, const float* weight, const float* grad,
                     const uint8_t* which, float* grad_weight, float* grad_bias, float* grad_x) {
    for (long k = 0; k < networks; k++)
        backward(s, x + (shared ? 0 : k * s.samples * s.image()), weight + k * s.weights(), grad + k * s.samples * s.pooled(),
                 which + k * s.samples * s.pooled(), grad_weight + k * s.weights(), grad_bias + k * s.outputs,
                 grad_x ? grad_x + k * s.samples * s.image() : nullptr);
}
}
