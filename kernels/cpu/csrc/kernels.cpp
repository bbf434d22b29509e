// Compiled once per instruction set, with -DISA=<namespace> and that set's flags.
#include "attention.h"
#include "blocks.h"
#include "choose.h"
#include "elementwise.h"
#include "int8.h"
#include "linear.h"
#include "sampling.h"

namespace ISA {

extern const Kernels kernels = {
    {attention<float>, attention<bf16>},
    {merge<float>, merge<bf16>},
    {norm<float>, norm<bf16>},
    {silu_mul<float>, silu_mul<bf16>},
    {rope<float>, rope<bf16>},
    {pack<float>, pack<bf16>},
    {linear<float>, linear<bf16>},
    {pack_blocks<Q4_0>, pack_blocks<Q4_1>, pack_blocks<Q8_0>},
    {{block_linear<float, Q4_0>, block_linear<float, Q4_1>, block_linear<float, Q8_0>},
     {block_linear<bf16, Q4_0>, block_linear<bf16, Q4_1>, block_linear<bf16, Q8_0>}},
    {pack_int8<float>, pack_int8<bf16>},
    {quantize<float>, quantize<bf16>},
    {int8_linear<float>, int8_linear<bf16>},
    {target_probs<float>, target_probs<bf16>},
    {argmax<float>, argmax<bf16>},
    draw_final,
    {choose<float>, choose<bf16>},
};

}  // namespace ISA
