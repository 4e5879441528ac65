#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace cllm {
namespace {

constexpr int64_t kFew = 128;    // the best tokens, which are usually enough for top_p
constexpr int64_t kMany = 1024;  // more than this are faster to process as a row than one by one
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Item {
    float value;
    int32_t index;
};

// Best first; ties by order in the row.
bool is_better(const Item& a, const Item& b) { return a.value > b.value || (a.value == b.value && a.index < b.index); }

// Otherwise memory of the size of a row would be requested from the system, page by page, at every token.
struct Scratch {
    std::vector<float> maxima, weights;
    std::vector<double> sums, few;
    std::vector<int32_t> ids;
    std::vector<Item> items;
};

thread_local Scratch thread_scratch;

// Never shrinks: a vector that shrinks and grows is filled with zeros each time.
template <class T>
T* room_for(int64_t count, std::vector<T>& memory) {
    if (int64_t(memory.size()) < count) memory.resize(size_t(count));
    return memory.data();
}

// Moves the best items that together reach `mass` to the front, and returns their number: at least one; all, if they do not
// reach it.
template <class WeightOf>
size_t best_that_reach(double mass, std::vector<Item>& items, WeightOf weight_of) {
    const auto first = items.begin();
    std::ptrdiff_t low = 0, high = std::ptrdiff_t(items.size());  // the answer is in (low, high]
    double below = 0.0;                                           // weight of the first `low`
    while (high - low > 1) {
        const std::ptrdiff_t middle = low + (high - low) / 2;
        std::nth_element(first + low, first + middle, first + high, is_better);
        double sum = below;
        for (std::ptrdiff_t i = low; i < middle; ++i) sum += weight_of(items[size_t(i)].index);
        if (sum >= mass) {
            high = middle;
        } else {
            low = middle;
            below = sum;
        }
    }
    return size_t(high);
}

struct Place {
    int64_t index;
    double before;  // the sum of what comes before it
};

// The first index whose running sum passes `target`; if rounding puts that beyond the total, the last with any weight.
template <class WeightOf>
Place place_of(double target, int64_t n, WeightOf weight_of) {
    Place last{0, 0.0};
    double sum = 0.0;
    for (int64_t i = 0; i < n; ++i) {
        const double weight = weight_of(i);
        if (weight > 0.0) last = {i, sum};
        sum += weight;
        if (sum > target) return last;
    }
    return last;
}

double total(const std::vector<double>& sums) { return std::accumulate(sums.begin(), sums.end(), 0.0); }

// How many of the best to take: up to a number of tokens or a weight, whichever comes first.
struct Goal {
    int64_t count;
    double mass;
};

// A value, how many are at least that, and what these weigh.
struct Bound {
    float value;
    int64_t count;
    double sum;
};

struct Ids {
    int32_t* ids;
    int64_t count;
    const int32_t* begin() const { return ids; }
    const int32_t* end() const { return ids + count; }
};

// One row at work.
class Row {
public:
    Row(const Kernels& kernels, const float* values, int64_t n, double peak, double temperature)
        : kernels_(kernels), values_(values), n_(n), peak_(peak), temperature_(std::max(temperature, double(FLT_MIN))) {}

    Ids find_largest(int64_t count) {
        find_between(floor_of(count), INFINITY);
        if (count >= found_.count) return found_;
        std::vector<Item>& items = items_found();
        std::nth_element(items.begin(), items.begin() + (count - 1), items.end(), is_better);
        const Item last = items[size_t(count - 1)];
        const auto is_worse = [&](int32_t id) { return is_better(last, {values_[id], id}); };
        found_.count = std::remove_if(found_.ids, found_.ids + found_.count, is_worse) - found_.ids;
        return found_;
    }

    double weigh(float min_weight) {
        scratch_.sums.resize(size_t(weight_blocks(n_)));
        float* weights = room_for(weight_blocks(n_) * kWeightBlock, scratch_.weights);
        kernels_.weigh(values_, n_, float(peak_), temperature_, min_weight, weights, scratch_.sums.data());
        return total(scratch_.sums);
    }

    int64_t draw(double u, const Truncation& truncation) {
        const double top_p = truncation.top_p, min_p = truncation.min_p;
        const int64_t top_k = 0 < truncation.top_k && truncation.top_k < n_ ? truncation.top_k : n_;
        // Beyond this top_k is larger than what find_few returns, as find_cut demands.
        if (top_k < n_ && top_k <= kMany) {
            find_largest(top_k);
            const double sum = weigh_few();
            return draw_from_few(top_p < 1.0 ? top_p * sum : kInfinity, min_p, u);
        }
        if (top_k == n_ && !(top_p < 1.0)) {
            weigh(float(min_p));
            return draw_from_row(-FLT_MAX, 0.0f, u);
        }
        double sum = weigh(0.0f);
        float cut = -FLT_MAX;
        if (top_k < n_) {
            cut = find_cut({top_k, kInfinity}, find_few());
            sum = sum_kept(cut, 0.0f);
        }
        if (top_p < 1.0) {
            const double mass = top_p * sum;
            const Bound few = find_few();
            if (few.count && few.sum >= mass) return draw_from_few(mass, min_p, u);
            cut = std::max(cut, find_cut({n_, mass}, few));
        }
        sum_kept(cut, float(min_p));
        return draw_from_row(cut, float(min_p), u);
    }

private:
    // A finite number that is at most the `count`-th largest of the finite values, and usually close to it.
    float floor_of(int64_t count) {
        float* maxima = room_for(n_ / kMaximaGroup, scratch_.maxima);
        const int64_t groups = kernels_.group_maxima(values_, n_, maxima);
        if (count > groups) return -FLT_MAX;
        // The count-th largest of the maxima of disjoint groups is at most the count-th largest value.
        std::nth_element(maxima, maxima + count - 1, maxima + groups, std::greater<float>());
        return std::max(-FLT_MAX, maxima[count - 1]);
    }

    void find_between(float low, float high) {
        found_.ids = room_for(n_, scratch_.ids);
        found_.count = kernels_.ids_between(values_, n_, low, high, found_.ids);
    }

    // About kFew of the best, at most kMany, and their weight; none if ties make them too many.
    Bound find_few() {
        const float floor = floor_of(kFew);
        find_between(floor, INFINITY);
        if (found_.count > kMany) return {std::nextafter(float(peak_), INFINITY), 0, 0.0};
        return {floor, found_.count, weigh_few()};
    }

    std::vector<Item>& items_found() {
        scratch_.items.clear();
        for (const int32_t id : found_) scratch_.items.push_back({values_[id], id});
        return scratch_.items;
    }

    // The weights of the ids found, in float64; returns their sum.
    double weigh_few() {
        scratch_.few.clear();
        for (const int32_t id : found_) scratch_.few.push_back(std::exp((double(values_[id]) - peak_) / temperature_));
        return total(scratch_.few);
    }

    // Keeps the heaviest of the ids found that together reach `mass` (at least one), without those that min_p drops.
    int64_t draw_from_few(double mass, double min_p, double u) {
        if (!found_.count) throw std::invalid_argument("the row has no finite value");
        std::vector<double>& few = scratch_.few;
        if (mass < kInfinity) {
            std::vector<Item>& items = items_found();
            for (size_t i = 0; i < items.size(); ++i) items[i].index = int32_t(i);
            const auto weight_of = [&](int32_t index) { return few[size_t(index)]; };
            const size_t kept = best_that_reach(mass, items, weight_of);
            for (size_t i = kept; i < items.size(); ++i) few[size_t(items[i].index)] = 0.0;
        }
        for (double& weight : few)
            if (weight < min_p) weight = 0.0;
        const Place place = place_of(u * total(few), int64_t(few.size()), [&](int64_t i) { return few[size_t(i)]; });
        return found_.ids[place.index];
    }

    double sum_kept(float cut, float min_weight) {
        kernels_.sum_kept(values_, scratch_.weights.data(), n_, cut, min_weight, scratch_.sums.data());
        return total(scratch_.sums);
    }

    // The smallest value among the best tokens that together reach the goal; those from `high` on must not reach it. Excess
    // ties get weight 0. Each pass over the row narrows the range in which the value may lie.
    float find_cut(const Goal& goal, Bound high) {
        Bound low{-FLT_MAX, n_, kInfinity};
        bool narrower = true;
        for (int pass = 0; low.count - high.count > kMany && narrower; ++pass) {
            float cuts[kCuts];
            int64_t counts[kCuts];
            double sums[kCuts];
            spread_cuts(low.value, high.value, pass, cuts);
            kernels_.sums_from(values_, scratch_.weights.data(), n_, cuts, counts, sums);
            narrower = false;
            for (int i = 0; i < kCuts; ++i) {
                if (!(low.value < cuts[i] && cuts[i] < high.value)) continue;
                (counts[i] >= goal.count || sums[i] >= goal.mass ? low : high) = {cuts[i], counts[i], sums[i]};
                narrower = true;
            }
        }
        find_between(low.value, high.value);
        return cut_of_found({goal.count - high.count, goal.mass - high.sum});
    }

    // Between the bounds; as long as there is no lower one, downwards in steps that grow faster and faster.
    void spread_cuts(float low, float high, int pass, float* cuts) const {
        const double distance = std::max({peak_ - double(high), temperature_, std::fabs(peak_) * 1e-5});
        const double step = low > -FLT_MAX ? (double(high) - double(low)) / (kCuts + 1) : std::ldexp(distance, pass - 3);
        for (int i = 0; i < kCuts; ++i) cuts[i] = float(std::max(double(high) - step * (i + 1), double(-FLT_MAX)));
    }

    // The same, among those found only.
    float cut_of_found(const Goal& goal) {
        if (!found_.count) return -FLT_MAX;  // all together do not reach it: too few are finite, or rounding lost some
        float* weights = scratch_.weights.data();
        std::vector<Item>& items = items_found();
        const auto weight_of = [&](int32_t id) { return double(weights[id]); };
        const size_t kept = std::min(size_t(goal.count), best_that_reach(goal.mass, items, weight_of));
        std::nth_element(items.begin(), items.begin() + std::ptrdiff_t(kept - 1), items.end(), is_better);
        const float cut = items[kept - 1].value;
        for (size_t i = kept; i < items.size(); ++i)
            if (items[i].value == cut) weights[items[i].index] = 0.0f;
        return cut;
    }

    // By the block sums of what is at least `cut` and weighs at least min_weight.
    int64_t draw_from_row(float cut, float min_weight, double u) const {
        const std::vector<double>& sums = scratch_.sums;
        const double target = u * total(sums);
        const Place block = place_of(target, int64_t(sums.size()), [&](int64_t i) { return sums[size_t(i)]; });
        const int64_t start = block.index * kWeightBlock;
        const float *values = values_ + start, *weights = scratch_.weights.data() + start;
        const auto weight_of = [&](int64_t i) {
            return values[i] >= cut && weights[i] >= min_weight ? double(weights[i]) : 0.0;
        };
        return start + place_of(target - block.before, std::min<int64_t>(kWeightBlock, n_ - start), weight_of).index;
    }

    const Kernels& kernels_;
    const float* values_;
    const int64_t n_;
    const double peak_, temperature_;
    Scratch& scratch_ = thread_scratch;
    Ids found_{nullptr, 0};
};

}  // namespace

void RowSampler::apply_mask(const float* values, int64_t n, const int32_t* mask, float* out) const {
    for (int64_t start = 0; start < n; start += 32) {
        const uint32_t bits = uint32_t(mask[start / 32]);
        const int64_t end = std::min<int64_t>(start + 32, n);
        // In most words all bits are the same.
        if (bits == 0) {
            std::fill(out + start, out + end, -INFINITY);
        } else if (bits == ~uint32_t(0)) {
            std::copy(values + start, values + end, out + start);
        } else {
            for (int64_t i = start; i < end; ++i) out[i] = bits >> (i - start) & 1 ? values[i] : -INFINITY;
        }
    }
}

int64_t RowSampler::draw(const float* values, int64_t n, double peak, double u, const Truncation& truncation) const {
    return Row(kernels_, values, n, peak, truncation.temperature).draw(u, truncation);
}

double RowSampler::log_total(const float* values, int64_t n, double peak) const {
    return peak + std::log(Row(kernels_, values, n, peak, 1.0).weigh(0.0f));
}

std::vector<int64_t> RowSampler::largest(const float* values, int64_t n, int64_t count) const {
    const Ids found = Row(kernels_, values, n, 0.0, 1.0).find_largest(count);
    return {found.begin(), found.end()};
}

}  // namespace cllm
