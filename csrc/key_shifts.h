// What is added to a model's keys before they are rounded to four bits.
#pragma once

#include "forward.h"
#include "model.h"

namespace cllm {

// Keys of a head lie around a point far from zero, and most of a scale's range goes into saying where. One vector added to
// all keys of a head adds one number to all scores of a query, which the softmax does not see; so each head's mean key is
// taken away. It is learnt from one step over tokens of the whole vocabulary: the same for every sequence and every start.
void learn_key_shifts(Model& model, Forward& forward);

}  // namespace cllm
