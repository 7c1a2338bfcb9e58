// A convolution, max pooling and ReLU as one step, forward and backward, for images whose channels come last. Windows of pooling lie two
// apart: 2x2, or 3x3 with a border of one, which overlap.
//
// Forward, the values of a window stay in registers until the largest is known. Backward, only that one has a gradient, and only if
// ReLU let it pass: an eighth or so of the products of a general convolution is left, on rows of pixels that are contiguous. Those
// rows are taken in whole vectors of eight, so that inputs must have seven more floats behind them that may be read (or, for
// gradients of inputs, written).

#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int FEW = 4;      // channels up to which columns, and not outputs, are taken side by side
constexpr uint8_t CUT = 9;  // what `which` says where ReLU let nothing pass

struct Shape {
    int samples, height, width, channels, outputs, kernel, pool, relu;
    int map_rows() const { return height - kernel + 1; }  // of the convolution
    int map_columns() const { return width - kernel + 1; }
    int border() const { return pool - 2; }  // of pooling
    int rows() const { return (map_rows() + border()) / 2; }
    int columns() const { return (map_columns() + border()) / 2; }
    int row() const { return kernel * channels; }  // floats of a kernel's row
    int taps() const { return kernel * row(); }
    long line() const { return long(width) * channels; }
    long image() const { return height * line(); }
    long pooled() const { return long(rows()) * columns() * outputs; }
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

    // The first `count` of them, each `apart` from the next.
    inline void write(typename Of<L>::vec bias, bool relu, int count, long apart, float* out, uint8_t* which) {
        best += bias;
        if (relu) {
            const typename Of<L>::ints cut = best <= 0.0f;
            best = cut ? typename Of<L>::vec{} : best;
            place = cut ? typename Of<L>::ints{} + int32_t(CUT) : place;
        }
        float values[L];
        int32_t places[L];
        std::memcpy(values, &best, sizeof(best));
        std::memcpy(places, &place, sizeof(place));
        for (int i = 0; i < count; i++) out[i * apart] = values[i];
        for (int i = 0; i < count; i++) which[i * apart] = uint8_t(places[i]);
    }
};

template <int L>
inline Largest<L> largest_of_four(const typename Of<L>::vec (&values)[4]) {
    Largest<L> found;
    found.start(values[0], 0);
    for (int32_t q = 1; q < 4; q++) found.take(values[q], q);
    return found;
}

// Outputs side by side: P windows beside each other, of L outputs each.
template <int L, int P>
inline void windows(const Shape& s, const float* x, const float* packed, const float* bias, float* out, uint8_t* which, int outputs) {
    typedef typename Of<L>::vec vec;
    vec sums[P][4] = {};
    const int taps = s.row(), next = s.channels;
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
template <int L, int P = ACCUMULATORS / 4>
inline void row_of_windows(const Shape& s, int count, const float* x, const float* packed, const float* bias, float* out,
                           uint8_t* which, int outputs) {
    for (; count >= P; count -= P, x += 2 * P * s.channels, out += P * s.outputs, which += P * s.outputs)
        windows<L, P>(s, x, packed, bias, out, which, outputs);
    if constexpr (P > 1) row_of_windows<L, P - 1>(s, count, x, packed, bias, out, which, outputs);
}

// P values of the convolution beside each other, of L outputs each.
template <int L, int P>
inline void values(const Shape& s, const float* x, const float* packed, float* map) {
    typename Of<L>::vec sums[P] = {};
    const int taps = s.row(), next = s.channels;
    for (int i = 0; i < s.kernel; i++)
        for (int t = 0; t < taps; t++, packed += L) {
            const typename Of<L>::vec weight = load<L>(packed);
            for (int p = 0; p < P; p++) sums[p] += x[i * s.line() + t + p * next] * weight;
        }
    for (int p = 0; p < P; p++) store<L>(map + p * L, sums[p]);
}

template <int L, int P = LANES>
inline void row_of_values(const Shape& s, int count, const float* x, const float* packed, float* map) {
    for (; count >= P; count -= P, x += P * s.channels, map += P * L) values<L, P>(s, x, packed, map);
    if constexpr (P > 1) row_of_values<L, P / 2>(s, count, x, packed, map);
}

// Windows of one image that overlap: every value is computed once, and read by all windows that it lies in.
template <int L>
void overlapping(const Shape& s, const float* x, const float* packed, const float* bias, float* map, float* out, uint8_t* which, int outputs) {
    const int height = s.map_rows(), width = s.map_columns();
    for (int y = 0; y < height; y++) row_of_values<L>(s, width, x + y * s.line(), packed, map + long(y) * width * L);
    for (int r = 0; r < s.rows(); r++)
        for (int c = 0; c < s.columns(); c++, out += s.outputs, which += s.outputs) {
            Largest<L> found;
            bool any = false;
            for (int q = 0; q < s.pool * s.pool; q++) {
                const int y = 2 * r - s.border() + q / s.pool, z = 2 * c - s.border() + q % s.pool;
                if (y < 0 || z < 0 || y >= height || z >= width) continue;
                const typename Of<L>::vec value = load<L>(map + (long(y) * width + z) * L);
                if (any) found.take(value, q);
                else found.start(value, q);
                any = true;
            }
            found.write(load<L>(bias), s.relu, outputs, 1, out, which);
        }
}

// L outputs from `start` on, of all samples.
template <int L>
void some_outputs(const Shape& s, int start, const float* x, const float* weight, const float* bias, float* out, uint8_t* which) {
    const int outputs = least(L, s.outputs - start), taps = s.taps();
    std::vector<float> packed(size_t(taps) * L);  // tap by tap
    float biases[L] = {};
    for (int o = 0; o < outputs; o++) {
        const float* from = weight + long(start + o) * taps;
        for (int t = 0; t < taps; t++) packed[size_t(t) * L + o] = from[t];
        biases[o] = bias[start + o];
    }
    std::vector<float> map(s.border() ? size_t(s.map_rows()) * s.map_columns() * L : 0);
    for (int n = 0; n < s.samples; n++) {
        if (s.border()) {
            const long at = n * s.pooled() + start;
            overlapping<L>(s, x + n * s.image(), packed.data(), biases, map.data(), out + at, which + at, outputs);
            continue;
        }
        for (int r = 0; r < s.rows(); r++) {
            const long at = n * s.pooled() + long(r) * s.columns() * s.outputs + start;
            row_of_windows<L>(s, s.columns(), x + n * s.image() + 2 * r * s.line(), packed.data(), biases, out + at, which + at, outputs);
        }
    }
}

void forward_by_outputs(const Shape& s, const float* x, const float* weight, const float* bias, float* out, uint8_t* which) {
    for (int start = 0; start < s.outputs; start += LANES)
        if (s.outputs - start > 8) some_outputs<LANES>(s, start, x, weight, bias, out, which);
        else some_outputs<8>(s, start, x, weight, bias, out, which);
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
                const long at = n * s.pooled() + (long(r) * s.columns() + c) * s.outputs;
                for (int start = 0; start < s.outputs; start += block)
                    windows_of_block(s, start, least(block, s.outputs - start), least(LANES, s.columns() - c),
                                     &planes[2L * r * s.width + 2 * c], &packed[size_t(start) * s.taps()], bias, out + at, which + at);
            }
    }
}

// --- backward --------------------------------------------------------------------------------------------------------------------

// Patches lie anywhere, and a shorter vector crosses the border of a cache line less often.
constexpr int WIDTH = 8;
constexpr int WIDEST = 8;  // vectors of a row that one pass takes

struct Gradient {  // of one output of the convolution that has one
    long at;       // where its patch starts
    float value;
};

// Adds to R vectors of each of G rows of a kernel what all gradients of one output give.
template <int R, int G>
void add_rows(const Gradient* from, int count, const float* x, long line, float* sums, int stride) {
    Of<WIDTH>::vec sum[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) sum[g][r] = load<WIDTH>(sums + g * stride + r * WIDTH);
    for (int i = 0; i < count; i++) {
        const float* patch = x + from[i].at;
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++) sum[g][r] += from[i].value * load<WIDTH>(patch + g * line + r * WIDTH);
    }
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) store<WIDTH>(sums + g * stride + r * WIDTH, sum[g][r]);
}

template <int R, int G>
void add_kernel(const Shape& s, const Gradient* from, int count, const float* x, float* sums, int stride) {
    const long line = long(s.width) * s.channels;
    int i = 0;
    for (; i + G <= s.kernel; i += G) add_rows<R, G>(from, count, x + i * line, line, sums + i * stride, stride);
    for (; i < s.kernel; i++) add_rows<R, 1>(from, count, x + i * line, line, sums + i * stride, stride);
}

void add_weights(const Shape& s, const Gradient* from, int count, const float* x, float* sums, int vectors) {
    const int stride = vectors * WIDTH;
    for (int start = 0; start < vectors; start += WIDEST) {
        const float* part = x + start * WIDTH;
        float* to = sums + start * WIDTH;
        switch (vectors - start < WIDEST ? vectors - start : WIDEST) {
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

void add_inputs(const Shape& s, const Gradient* from, int count, const float* rows, int vectors, float* grad_x) {
    const long line = long(s.width) * s.channels;
    for (int i = 0; i < count; i++)
        for (int k = 0; k < s.kernel; k++) {
            float* to = grad_x + from[i].at + k * line;
            const float* row = rows + k * vectors * WIDTH;
            for (int v = 0; v < vectors; v++) store<WIDTH>(to + v * WIDTH, load<WIDTH>(to + v * WIDTH) + from[i].value * load<WIDTH>(row + v * WIDTH));
        }
}

void backward(const Shape& s, const float* x, const float* weight, const float* grad, const uint8_t* which, float* grad_weight,
              float* grad_bias, float* grad_x) {
    const int vectors = (s.row() + WIDTH - 1) / WIDTH, windows = s.rows() * s.columns();
    const size_t kernel = size_t(s.kernel) * vectors * WIDTH;
    std::vector<float> rows(s.outputs * kernel), sums(s.outputs * kernel);  // kernels whose rows are whole vectors
    for (long r = 0; r < long(s.outputs) * s.kernel; r++)
        std::memcpy(&rows[r * vectors * WIDTH], weight + r * s.row(), sizeof(float) * s.row());
    const long line = long(s.width) * s.channels;
    long places[CUT + 1] = {};
    for (int q = 0; q < s.pool * s.pool; q++) places[q] = q / s.pool * line + long(q % s.pool) * s.channels;
    std::vector<long> corners(windows);
    for (int w = 0; w < windows; w++)
        corners[w] = (2 * (w / s.columns()) - s.border()) * line + (2L * (w % s.columns()) - s.border()) * s.channels;
    std::vector<Gradient> found(windows + 1);
    std::memset(grad_bias, 0, sizeof(float) * s.outputs);
    if (grad_x) std::memset(grad_x, 0, sizeof(float) * s.samples * s.image());
    for (int n = 0; n < s.samples; n++)
        for (int o = 0; o < s.outputs; o++) {
            const float* of_output = grad + n * s.pooled() + o;
            const uint8_t* place = which + n * s.pooled() + o;
            int count = 0;
            float total = 0;
            for (int w = 0; w < windows; w++, of_output += s.outputs, place += s.outputs) {
                found[count] = {corners[w] + places[*place], *of_output};
                const bool passed = *place != CUT;
                total += passed ? *of_output : 0.0f;
                count += passed;
            }
            grad_bias[o] += total;
            add_weights(s, found.data(), count, x + n * s.image(), &sums[o * kernel], vectors);
            if (grad_x) add_inputs(s, found.data(), count, &rows[o * kernel], vectors, grad_x + n * s.image());
        }
    for (long r = 0; r < long(s.outputs) * s.kernel; r++)
        std::memcpy(grad_weight + r * s.row(), &sums[r * vectors * WIDTH], sizeof(float) * s.row());
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
    const auto forward = s.channels <= FEW && !s.border() ? forward_by_columns : forward_by_outputs;
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
