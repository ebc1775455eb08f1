// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! arm64 stage-2 page tables. The companion Linux series lives beside this crate, in `linux/`.
