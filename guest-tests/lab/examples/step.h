// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* Marks of the steps of a program for `granule lab workload` (docs/workloads.md). */

/* Begins step N, a constant from 1 to 8. The processor executes the hint as a no-op. */
#define BEGIN_STEP(n) __asm__ volatile("hint #%0" : : "i"(0x77 + (n)) : "memory")
/* Ends the step. */
#define END_STEP() __asm__ volatile("hint #0x60" : : : "memory")
