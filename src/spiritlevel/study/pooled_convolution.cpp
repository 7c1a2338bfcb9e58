// A convolution, 2x2 max pooling and ReLU as one step, forward and backward, for images whose channels come last.
//
// Forward, the four values of a window stay in registers until the largest is known. Backward, only that one has a gradient, and
// only if ReLU let it pass: an eighth or so of the products of a general convolution is left, on rows of pixels that are contiguous.
// Rows are taken in whole vectors, so that inputs must have seven more floats behind them that may be read (or, for gradients of
// inputs, written).

#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int LANES = 8;
constexpr int WIDEST = 8;     // vectors of a row that one pass takes
constexpr int REGISTERS = 12;  // accumulators that fit beside operands
constexpr uint8_t CUT = 4;    // what `which` says where ReLU let nothing pass
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

inline vec load(const float* from) { return *reinterpret_cast<const vec*>(from); }
inline void store(float* to, vec value) { *reinterpret_cast<vec*>(to) = value; }
inline int up(int count) { return (count + LANES - 1) / LANES; }

struct Shape {
    int samples, height, width, channels, outputs, kernel, relu;
    int rows() const { return (height - kernel + 1) / 2; }
    int columns() const { return (width - kernel + 1) / 2; }
    int row() const { return kernel * channels; }  // floats of a kernel's row
    long image() const { return long(height) * width * channels; }
    long pooled() const { return long(rows()) * columns() * outputs; }
    long weights() const { return long(outputs) * kernel * row(); }
};

// The largest of the four values of a window, the first of equal ones, as torch has it; NaN passes.
template <int V>
inline void finish(const Shape& s, const vec (&sums)[4][V], const vec* bias, float* out, uint8_t* which, int outputs) {
    for (int v = 0; v < V; v++) {
        vec best = sums[0][v];
        ints place = {};
        for (int32_t q = 1; q < 4; q++) {
            const ints better = (sums[q][v] > best) | (sums[q][v] != sums[q][v]);
            best = better ? sums[q][v] : best;
            place = better ? ints{} + q : place;
        }
        best += bias[v];
        if (s.relu) {
            const ints cut = best <= 0.0f;
            best = cut ? vec{} : best;
            place = cut ? ints{} + CUT : place;
        }
        const int there = outputs - v * LANES < LANES ? outputs - v * LANES : LANES;
        if (there == LANES) store(out + v * LANES, best);
        else std::memcpy(out + v * LANES, &best, sizeof(float) * there);
        for (int i = 0; i < there; i++) which[v * LANES + i] = uint8_t(place[i]);
    }
}

// P windows beside each other, V vectors of outputs.
template <int V, int P>
inline void windows(const Shape& s, const float* x, const float* packed, const vec* bias, float* out, uint8_t* which, int outputs) {
    vec sums[P][4][V] = {};
    const int line = s.width * s.channels, taps = s.row(), next = s.channels;
    for (int i = 0; i < s.kernel; i++) {
        const float *above = x + i * line, *below = above + line;
        for (int t = 0; t < taps; t++, packed += V * LANES) {
            vec weight[V];
            for (int v = 0; v < V; v++) weight[v] = load(packed + v * LANES);
            for (int p = 0; p < P; p++) {
                const int at = t + 2 * p * next;
                const float values[4] = {above[at], above[at + next], below[at], below[at + next]};
                for (int q = 0; q < 4; q++)
                    for (int v = 0; v < V; v++) sums[p][q][v] += values[q] * weight[v];
            }
        }
    }
    for (int p = 0; p < P; p++) finish<V>(s, sums[p], bias, out + p * s.outputs, which + p * s.outputs, outputs);
}

template <int V, int P>
void forward_part(const Shape& s, const float* x, const float* packed, const vec* bias, float* out, uint8_t* which, int outputs) {
    for (int n = 0; n < s.samples; n++)
        for (int r = 0; r < s.rows(); r++) {
            const float* line = x + n * s.image() + 2L * r * s.width * s.channels;
            const long at = n * s.pooled() + long(r) * s.columns() * s.outputs;
            int c = 0;
            for (; c + P <= s.columns(); c += P)
                windows<V, P>(s, line + 2 * c * s.channels, packed, bias, out + at + c * s.outputs, which + at + c * s.outputs, outputs);
            for (; c < s.columns(); c++)
                windows<V, 1>(s, line + 2 * c * s.channels, packed, bias, out + at + c * s.outputs, which + at + c * s.outputs, outputs);
        }
}

// The kernels of a network, or of several that see the same images, tap by tap with outputs side by side.
class Kernels {
  public:
    Kernels(const Shape& s, const float* weight, const float* bias) : shape(s) {
        const int taps = s.kernel * s.row();
        for (int start = 0; start < s.outputs; start += MOST) {
            parts.push_back({start, s.outputs - start < MOST ? s.outputs - start : MOST, {}, {}});
            Part& part = parts.back();
            const int lanes = up(part.outputs) * LANES;
            part.packed.resize(size_t(taps) * lanes);
            for (int o = 0; o < part.outputs; o++)
                for (int t = 0; t < taps; t++) part.packed[size_t(t) * lanes + o] = weight[long(start + o) * taps + t];
            std::memcpy(part.bias, bias + start, sizeof(float) * part.outputs);
        }
    }

    void apply(int samples, const float* x, float* out, uint8_t* which) const {
        Shape s = shape;
        s.samples = samples;
        for (const Part& part : parts) {
            float* to = out + part.start;
            uint8_t* say = which + part.start;
            switch (up(part.outputs)) {
                case 1: forward_part<1, 2>(s, x, part.packed.data(), part.bias, to, say, part.outputs); break;
                case 2: forward_part<2, 1>(s, x, part.packed.data(), part.bias, to, say, part.outputs); break;
                default: forward_part<3, 1>(s, x, part.packed.data(), part.bias, to, say, part.outputs);
            }
        }
    }

  private:
    static constexpr int MOST = 3 * LANES;  // outputs whose four values of a window fit into the registers
    struct Part {
        int start, outputs;
        std::vector<float> packed;
        vec bias[3];
    };
    Shape shape;
    std::vector<Part> parts;
};

// Networks that see the same images are one with the outputs of all, which are then given back to each.
void forward_shared(int networks, const Shape& s, const float* x, const float* weight, const float* bias, float* out, uint8_t* which) {
    Shape all = s;
    all.outputs *= networks;
    const Kernels kernels(all, weight, bias);
    std::vector<float> values(all.pooled());
    std::vector<uint8_t> places(all.pooled());
    const long windows = long(s.rows()) * s.columns();
    for (int n = 0; n < s.samples; n++) {
        kernels.apply(1, x + n * s.image(), values.data(), places.data());
        for (int k = 0; k < networks; k++) {
            float* to = out + (long(k) * s.samples + n) * s.pooled();
            uint8_t* say = which + (long(k) * s.samples + n) * s.pooled();
            for (long w = 0; w < windows; w++)
                for (int o = 0; o < s.outputs; o++) {
                    *to++ = values[w * all.outputs + k * s.outputs + o];
                    *say++ = places[w * all.outputs + k * s.outputs + o];
                }
        }
    }
}

struct Gradient {  // of one output of the convolution that has one
    long at;       // where its patch starts
    float value;
};

// Adds to R vectors of each of G rows of a kernel what all gradients of one output give.
template <int R, int G>
void add_rows(const Gradient* from, int count, const float* x, long line, float* sums, int stride) {
    vec sum[G][R];
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) sum[g][r] = load(sums + g * stride + r * LANES);
    for (int i = 0; i < count; i++) {
        const float* patch = x + from[i].at;
        for (int g = 0; g < G; g++)
            for (int r = 0; r < R; r++) sum[g][r] += from[i].value * load(patch + g * line + r * LANES);
    }
    for (int g = 0; g < G; g++)
        for (int r = 0; r < R; r++) store(sums + g * stride + r * LANES, sum[g][r]);
}

template <int R, int G>
void add_kernel(const Shape& s, const Gradient* from, int count, const float* x, float* sums, int stride) {
    const long line = long(s.width) * s.channels;
    int i = 0;
    for (; i + G <= s.kernel; i += G) add_rows<R, G>(from, count, x + i * line, line, sums + i * stride, stride);
    for (; i < s.kernel; i++) add_rows<R, 1>(from, count, x + i * line, line, sums + i * stride, stride);
}

void add_weights(const Shape& s, const Gradient* from, int count, const float* x, float* sums, int vectors) {
    const int stride = vectors * LANES;
    for (int start = 0; start < vectors; start += WIDEST) {
        const float* part = x + start * LANES;
        float* to = sums + start * LANES;
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
            const float* row = rows + k * vectors * LANES;
            for (int v = 0; v < vectors; v++) store(to + v * LANES, load(to + v * LANES) + from[i].value * load(row + v * LANES));
        }
}

void backward(const Shape& s, const float* x, const float* weight, const float* grad, const uint8_t* which, float* grad_weight,
              float* grad_bias, float* grad_x) {
    const int vectors = up(s.row()), windows = s.rows() * s.columns();
    const size_t kernel = size_t(s.kernel) * vectors * LANES;
    std::vector<float> rows(s.outputs * kernel), sums(s.outputs * kernel);  // kernels whose rows are whole vectors
    for (long r = 0; r < long(s.outputs) * s.kernel; r++)
        std::memcpy(&rows[r * vectors * LANES], weight + r * s.row(), sizeof(float) * s.row());
    const long line = long(s.width) * s.channels;
    const long places[5] = {0, s.channels, line, line + s.channels, 0};
    std::vector<long> corners(windows);
    for (int w = 0; w < windows; w++) corners[w] = 2 * (w / s.columns()) * line + 2L * (w % s.columns()) * s.channels;
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
        std::memcpy(grad_weight + r * s.row(), &sums[r * vectors * LANES], sizeof(float) * s.row());
}

}  // namespace

extern "C" {

// Chosen images, channels last, inside a border that is left as it is.
void gather(const float* images, const int64_t* chosen, int count, int channels, int height, int width, int border, float* out) {
    const long line = long(width + 2 * border) * channels, image = (height + 2 * border) * line;
    for (int n = 0; n < count; n++) {
        const float* from = images + chosen[n] * channels * height * width;
        float* to = out + n * image + border * line + border * channels;
        for (int c = 0; c < channels; c++)
            for (int h = 0; h < height; h++)
                for (int w = 0; w < width; w++) to[h * line + w * channels + c] = *from++;
    }
}

// Of several networks, one after the other; `shared` says that all have the same inputs.
void pooled_forward(int networks, int shared, Shape s, const float* x, const float* weight, const float* bias, float* out,
                    uint8_t* which) {
    if (shared) return forward_shared(networks, s, x, weight, bias, out, which);
    for (long k = 0; k < networks; k++)
        Kernels(s, weight + k * s.weights(), bias + k * s.outputs)
            .apply(s.samples, x + k * s.samples * s.image(), out + k * s.samples * s.pooled(), which + k * s.samples * s.pooled());
}

void pooled_backward(int networks, int shared, Shape s, const float* x, const float* weight, const float* grad,
                     const uint8_t* which, float* grad_weight, float* grad_bias, float* grad_x) {
    for (long k = 0; k < networks; k++)
        backward(s, x + (shared ? 0 : k * s.samples * s.image()), weight + k * s.weights(), grad + k * s.samples * s.pooled(),
                 which + k * s.samples * s.pooled(), grad_weight + k * s.weights(), grad_bias + k * s.outputs,
                 grad_x ? grad_x + k * s.samples * s.image() : nullptr);
}
}
