// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Capacity of a hugetlb pool (`Documentation/admin-guide/mm/hugetlbpage.rst`).

use granule_types::units::Bytes;

use super::MemoryError;

/// Hugetlb pool; counts are in pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HugetlbPool {
    /// Size of a page.
    pub page: Bytes,
    /// Pages in the pool.
    pub total: u64,
    /// Unused pages.
    pub free: u64,
    /// Unused pages that are reserved for existing mappings.
    pub reserved: u64,
    /// Pages above the fixed size of the pool.
    pub surplus: u64,
    /// Maximum number of surplus pages.
    pub overcommit: u64,
}

impl HugetlbPool {
    /// Returns the number of pages that a mapping can reserve.
    pub const fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved) + self.overcommit.saturating_sub(self.surplus)
    }

    /// Checks that a mapping of `size` bytes can reserve its pages.
    ///
    /// # Errors
    /// [`MemoryError::PoolShort`] with a remedy.
    pub fn check(&self, size: Bytes) -> Result<(), MemoryError> {
        let needed = size.0.div_ceil(self.page.0);
        let available = self.available();
        if available < needed {
            return Err(MemoryError::PoolShort {
                page: self.page,
                needed,
                available,
                total: self.total - self.surplus.min(self.total) + (needed - available),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool([total, free, reserved, surplus, overcommit]: [u64; 5]) -> HugetlbPool {
        HugetlbPool { page: Bytes::mib(2), total, free, reserved, surplus, overcommit }
    }

    #[test]
    fn reserved_pages_are_not_available() {
        let pool = pool([40, 37, 5, 0, 0]);

        assert_eq!(pool.available(), 32);
        assert!(pool.check(Bytes::mib(64)).is_ok());
    }

    #[test]
    fn surplus_pages_are_available() {
        assert!(pool([0, 0, 0, 0, 32]).check(Bytes::mib(64)).is_ok());
    }

    #[test]
    fn a_short_pool_reports_a_sufficient_size() {
        let error = pool([40, 10, 5, 0, 0]).check(Bytes::mib(64)).unwrap_err();

        let MemoryError::PoolShort { needed, available, total, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((needed, available, total), (32, 5, 67));
    }
}
