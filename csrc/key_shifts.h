// The shift that is added to a model's keys before they are rounded to four bits.
#pragma once

#include "forward.h"
#include "model.h"

namespace cllm {

// Keys of a head lie around a point far from zero, which would take most of a scale's range. Adding one vector to all keys of
// a head adds one number to all scores of a query, which the softmax cancels; so each head's mean key is subtracted. It comes
// from one step over tokens of the whole vocabulary, and is the same for every sequence and every start. Where scores are capped,
// nothing cancels it, and it is zero.
void learn_key_shifts(Model& model, Forward& forward);

}  // namespace cllm
