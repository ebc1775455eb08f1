// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What an exception of the guest's means, in words (Intel SDM volume 3, 7.15).

const PAGE_FAULT: u64 = 14;

/// Whether an exception leaves an address in CR2.
pub const fn has_address(vector: u64) -> bool {
    vector == PAGE_FAULT
}

/// Describes an exception by its number and error code.
pub fn describe(vector: u64, error: u64) -> String {
    let what = match vector {
        0 => "a division by zero",
        1 | 3 => "a breakpoint",
        2 => "a non-maskable interrupt",
        6 => "an instruction that does not exist",
        7 => "floating point, which is off",
        8 => "a double fault",
        12 => "a fault of the stack segment",
        13 => return format!("general protection fault, error code {error:#x}"),
        PAGE_FAULT => return format!("page fault {}", page_fault(error)),
        17 => "an access that is not aligned",
        18 => "a machine check: an error of memory",
        _ => return format!("exception {vector}, error code {error:#x}"),
    };
    what.to_owned()
}

/// The bits of a page fault's error code.
fn page_fault(error: u64) -> String {
    let access = match error {
        _ if error & (1 << 4) != 0 => "by an instruction fetch",
        _ if error & (1 << 1) != 0 => "by a write",
        _ => "by a read",
    };
    let why = match error {
        _ if error & (1 << 3) != 0 => "a reserved bit is set in the guest's tables",
        _ if error & 1 != 0 => "the guest's tables do not permit it",
        _ => "the guest's tables map nothing there",
    };
    format!("{access}: {why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_fault_is_told_with_access_and_reason() {
        assert_eq!(
            describe(14, 0b10),
            "page fault by a write: the guest's tables map nothing there"
        );
        assert_eq!(
            describe(14, 0b1_0001),
            "page fault by an instruction fetch: the guest's tables do not permit it"
        );
        assert!(has_address(14) && !has_address(13));
    }

    #[test]
    fn what_is_not_known_is_told_by_number() {
        assert_eq!(describe(21, 3), "exception 21, error code 0x3");
    }
}
