// Dense layers with ReLU between them and cross entropy behind them as one step: losses, and the gradients of weights, biases and inputs.
//
// Written for batches as small as four samples, where a call of a general library takes longer than its products. Weights are read
// as they lie, (outputs, inputs), a vector of inputs at a time. Where gradients of inputs are summed, the last vector of a row reads beyond
// it, so that weights must have LANES - 1 floats behind them; what comes of those is not written.

#include <cmath>
#include <cstring>
#include <vector>

#include "vectors.h"

namespace {

constexpr int ROWS = 4;                                // samples, or outputs, that one pass takes
constexpr int SIDE = ACCUMULATORS / ROWS;              // outputs of products along rows
constexpr int WIDE = ACCUMULATORS > 12 ? 5 : 3;        // vectors of other products: they also need operands of that number
constexpr int up(int count) { return (count + LANES - 1) / LANES * LANES; }

// The first `count` numbers, fewer than a vector has, and zeros: what lies behind them may be of a network that diverged.
inline vec load_some(const float* from, int count) {
    float some[LANES] = {};
    std::memcpy(some, from, sizeof(float) * count);
    return load(some);
}

// out[m][n] = sum over k of a[m][k] b[n][k] + bias[n], for M rows of a and N of b; rows of a end with zeros.
template <int M, int N>
inline void along_rows(int inputs, const float* a, long a_row, const float* b, long b_row, const float* bias, float* out, long out_row) {
    vec sums[M][N] = {};
    const auto add = [&](int k, auto read) {
        vec of_a[M];
        for (int m = 0; m < M; m++) of_a[m] = load(a + m * a_row + k);
        for (int n = 0; n < N; n++) {
            const vec of_b = read(b + n * b_row + k);
            for (int m = 0; m < M; m++) sums[m][n] += of_a[m] * of_b;
        }
    };
    int k = 0;
    for (; k + LANES <= inputs; k += LANES) add(k, [](const float* from) { return load(from); });
    if (k < inputs) add(k, [=](const float* from) { return load_some(from, inputs - k); });
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) out[m * out_row + n] = sum_of(sums[m][n]) + bias[n];
}

template <int M>
void some_rows(int inputs, int outputs, const float* a, long a_row, const float* b, const float* bias, float* out, long out_row) {
    int n = 0;
    for (; n + SIDE <= outputs; n += SIDE) along_rows<M, SIDE>(inputs, a, a_row, b + long(n) * inputs, inputs, bias + n, out + n, out_row);
    for (; n < outputs; n++) along_rows<M, 1>(inputs, a, a_row, b + long(n) * inputs, inputs, bias + n, out + n, out_row);
}

void layer(int samples, int inputs, int outputs, const float* a, const float* weight, const float* bias, float* out, long out_row) {
    const long a_row = up(inputs);
    int m = 0;
    for (; m + ROWS <= samples; m += ROWS) some_rows<ROWS>(inputs, outputs, a + m * a_row, a_row, weight, bias, out + m * out_row, out_row);
    for (; m < samples; m++) some_rows<1>(inputs, outputs, a + m * a_row, a_row, weight, bias, out + m * out_row, out_row);
}

// A matrix whose entries lie `row` and `column` apart.
struct Matrix {
    const float* at;
    long row, column;
};

// out[i][k] = sum over j of p[i][j] q[j][k], for I rows and V vectors of columns, of which the last has `last` columns.
template <int I, int V>
inline void along_columns(Matrix p, int terms, const float* q, long q_row, float* out, long out_row, int last) {
    vec sums[I][V] = {};
    for (int j = 0; j < terms; j++) {
        vec of_q[V];
        for (int v = 0; v < V; v++) of_q[v] = load(q + j * q_row + v * LANES);
        for (int i = 0; i < I; i++) {
            const float factor = p.at[i * p.row + j * p.column];
            for (int v = 0; v < V; v++) sums[i][v] += factor * of_q[v];
        }
    }
    for (int i = 0; i < I; i++) {
        for (int v = 0; v + 1 < V; v++) store(out + i * out_row + v * LANES, sums[i][v]);
        std::memcpy(out + i * out_row + (V - 1) * LANES, &sums[i][V - 1], sizeof(float) * last);
    }
}

// Columns outside: what they need of q stays in the nearest cache while all rows pass.
template <int V>
void some_columns(Matrix p, int rows, int terms, const float* q, long q_row, float* out, long out_row, int last) {
    int i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        along_columns<ROWS, V>({p.at + i * p.row, p.row, p.column}, terms, q, q_row, out + i * out_row, out_row, last);
    for (; i < rows; i++) along_columns<1, V>({p.at + i * p.row, p.row, p.column}, terms, q, q_row, out + i * out_row, out_row, last);
}

void product(Matrix p, int rows, int terms, const float* q, long q_row, int columns, float* out, long out_row) {
    int k = 0;
    for (; k + WIDE * LANES <= columns; k += WIDE * LANES) some_columns<WIDE>(p, rows, terms, q + k, q_row, out + k, out_row, LANES);
    for (; k < columns; k += LANES) some_columns<1>(p, rows, terms, q + k, q_row, out + k, out_row, columns - k < LANES ? columns - k : LANES);
}

// The mean cross entropy; outputs become its gradient with respect to them.
float cross_entropy(int samples, int classes, const int64_t* labels, float* outputs) {
    double total = 0;
    for (int n = 0; n < samples; n++, outputs += classes) {
        float largest = outputs[0], sum = 0;
        for (int c = 1; c < classes; c++) largest = outputs[c] > largest ? outputs[c] : largest;
        const float right = outputs[labels[n]] - largest;
        for (int c = 0; c < classes; c++) sum += outputs[c] = std::exp(outputs[c] - largest);
        total += std::log(sum) - right;
        for (int c = 0; c < classes; c++) outputs[c] = (outputs[c] / sum - float(c == labels[n])) / float(samples);
    }
    return float(total / samples);
}

// The activations of one network: rows of whole vectors, with zeros at their ends.
struct Layers {
    int samples, count;
    const int* sizes;  // of the inputs and of every layer
    std::vector<std::vector<float>> inputs;

    Layers(int samples, int count, const int* sizes) : samples(samples), count(count), sizes(sizes), inputs(count) {
        for (int l = 0; l < count; l++) inputs[l].resize(size_t(samples) * up(sizes[l]) + LANES);
    }

    float step(const int64_t* labels, const float* const* weights, const float* const* biases, float* const* grad_weights,
               float* const* grad_biases) {
        std::vector<float> gradient(size_t(samples) * sizes[count]);
        for (int l = 0; l < count; l++) {
            const bool last = l + 1 == count;
            const long row = last ? sizes[count] : up(sizes[l + 1]);
            float* out = last ? gradient.data() : inputs[l + 1].data();
            layer(samples, sizes[l], sizes[l + 1], inputs[l].data(), weights[l], biases[l], out, row);
            for (long i = 0; !last && i < samples * row; i++) out[i] = out[i] <= 0.0f ? 0.0f : out[i];  // NaN passes
        }
        const float loss = cross_entropy(samples, sizes[count], labels, gradient.data());
        long row = sizes[count];
        for (int l = count - 1; l >= 0; l--) {
            const int outputs = sizes[l + 1];
            const Matrix of_outputs = {gradient.data(), row, 1}, turned = {gradient.data(), 1, row};
            product(turned, outputs, samples, inputs[l].data(), up(sizes[l]), sizes[l], grad_weights[l], sizes[l]);
            std::memset(grad_biases[l], 0, sizeof(float) * outputs);
            for (int n = 0; n < samples; n++)
                for (int o = 0; o < outputs; o++) grad_biases[l][o] += gradient[n * row + o];
            std::vector<float> before(size_t(samples) * up(sizes[l]));
            product(of_outputs, samples, outputs, weights[l], sizes[l], sizes[l], before.data(), up(sizes[l]));
            if (l)
                for (size_t i = 0; i < before.size(); i++) before[i] = inputs[l][i] > 0.0f ? before[i] : 0.0f;
            gradient.swap(before);
            row = up(sizes[l]);
        }
        inputs[0].assign(gradient.begin(), gradient.end());
        return loss;
    }
};

}  // namespace

extern "C" {

// Of several networks, one after the other. Inputs are images, (pixels, channels), whose channels come first to the layers; `sizes` are
// of the inputs and of every layer. Writes the losses and the gradients of weights, biases and images.
void dense_step(int networks, int samples, int pixels, int channels, int layers, const int* sizes, const float* images,
                const int64_t* labels, float* const* weights, float* const* biases, float* const* grad_weights,
                float* const* grad_biases, float* grad_images, float* losses) {
    const long image = long(pixels) * channels, row = up(sizes[0]);
    std::vector<float*> of_network[4];
    for (int k = 0; k < networks; k++) {
        Layers of(samples, layers, sizes);
        for (auto& pointers : of_network) pointers.clear();
        for (int l = 0; l < layers; l++) {
            const long matrix = long(sizes[l]) * sizes[l + 1] * k, vector = long(sizes[l + 1]) * k;
            of_network[0].push_back(weights[l] + matrix);
            of_network[1].push_back(biases[l] + vector);
            of_network[2].push_back(grad_weights[l] + matrix);
            of_network[3].push_back(grad_biases[l] + vector);
        }
        const float* from = images + k * samples * image;
        for (int n = 0; n < samples; n++)
            for (int c = 0; c < channels; c++)
                for (int p = 0; p < pixels; p++) of.inputs[0][n * row + c * pixels + p] = from[n * image + p * channels + c];
        losses[k] = of.step(labels + long(k) * samples, of_network[0].data(), of_network[1].data(), of_network[2].data(), of_network[3].data());
        float* to = grad_images + k * samples * image;
        for (int n = 0; n < samples; n++)
            for (int p = 0; p < pixels; p++)
                for (int c = 0; c < channels; c++) to[n * image + p * channels + c] = of.inputs[0][n * row + c * pixels + p];
    }
}
}
