/* What the files that implement torch's operators share: the functions of torch's C interface, and tensors as they give them. */

#ifndef INRO_OPERATORS_H
#define INRO_OPERATORS_H

#include "kernels.h"

#include <stdio.h>
#include <string.h>

typedef uint64_t word;
typedef void *handle;
typedef void (*boxed)(word *, uint64_t, uint64_t);

enum { ABI = 2 << 8 | 11 };                            /* the words are as torch 2.11 lays them out */
static const uint64_t abi = (uint64_t)ABI << 48;

/* In the order of TORCH_FUNCTIONS in kernels/binding.py. Those that give an int32_t give 0 for success. */
struct torch_functions {
    int32_t (*delete_tensor)(handle);
    int32_t (*data)(handle, void **);
    int32_t (*dim)(handle, int64_t *);
    int32_t (*sizes)(handle, int64_t **);
    int32_t (*strides)(handle, int64_t **);
    int32_t (*dtype)(handle, int32_t *);
    int32_t (*device)(handle, int32_t *);
    int32_t (*layout)(handle, int32_t *);
    int32_t (*empty)(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, handle *);
    int32_t (*library)(const char *, const char *, const char *, uint32_t, handle *);
    int32_t (*implement)(handle, const char *, boxed, uint64_t);
    int32_t (*call)(const char *, const char *, word *, uint64_t);
    int32_t (*threads)(uint32_t *);
    void (*check)(_Bool, const char *, const char *, uint32_t, const char *);
    void (*delete_word)(word *);
    int32_t (*float32)(void);
    int32_t (*bfloat16)(void);
    int32_t (*float16)(void);
    int32_t (*float64)(void);
    int32_t (*int8)(void);
    int32_t (*uint8)(void);
    int32_t (*int32)(void);
    int32_t (*int64)(void);
    int32_t (*cpu)(void);
    int32_t (*strided)(void);
    int32_t (*contiguous_format)(void);
    int32_t (*list_size)(handle, size_t *);
    int32_t (*list_item)(handle, size_t, word *);
    int32_t (*delete_list)(handle);
    const char *(*last_error)(void);                   /* NULL before torch 2.13 */
};

enum { DIMS = 32 };

typedef struct {
    char *data;
    int64_t dim, *sizes, *strides;
    int32_t dtype;
    int plain;                                         /* a strided tensor on the CPU */
} tensor;

#pragma GCC visibility push(hidden)
extern struct torch_functions torch;
extern int32_t dtypes[3], float64_dtype, int8_dtype, uint8_dtype, int32_dtype, int64_dtype, cpu, strided;

/* tensors.c */
tensor tensor_of(word given);
int64_t numel(const tensor *t);
int contiguous(const tensor *t);
int64_t row_step(const tensor *x);
int float_dtype(int32_t dtype);
void drop(word given);
word optional(word given);
void drop_optional(word given);
void fail(const char *message);
void call_reference(const char *name, word *stack);
handle result(const tensor *x, int64_t rows, int64_t columns, int dtype, void **data);
void make_contiguous(word *given);
int threads(void);

/* conv_operators.c */
void op_conv(word *stack, uint64_t inputs, uint64_t outputs);
void op_conv_static(word *stack, uint64_t inputs, uint64_t outputs);
void op_max_pool2d(word *stack, uint64_t inputs, uint64_t outputs);
#pragma GCC visibility pop

#endif
