// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Nothing: see `benches/`.
