// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Property test: a disk behaves as an array of sectors under random requests.

use proptest::prelude::*;

use super::*;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_disk_behaves_as_an_array_of_sectors(
        operations in prop::collection::vec((0..3_u8, 0..280_u64, 1..9_usize, any::<u8>()), 1..30),
    ) {
        let (folder, memory) = (tempfile::tempdir().unwrap(), memory());
        let mut driver = Driver::start(&memory, disk(&folder, false), EVENT_IDX);
        let mut model = content(&folder);
        for (kind, sector, count, byte) in operations {
            let first = usize::try_from(sector).unwrap() * 512;
            let length = count * 512;
            let expected = if first + length <= model.len() { OK } else { IOERR };
            let range = first..first + length;
            let status = match kind {
                0 => {
                    let (bytes, status) =
                        read(&mut driver, sector, u32::try_from(length).unwrap());
                    if status == OK {
                        prop_assert_eq!(&bytes[..], &model[range]);
                    }
                    status
                }
                1 => {
                    if expected == OK {
                        model[range].fill(byte);
                    }
                    write(&mut driver, sector, vec![byte; length])
                }
                _ => {
                    if expected == OK {
                        model[range].fill(0);
                    }
                    let sectors = u32::try_from(count).unwrap();
                    clear(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, sector, sectors, u32::from(byte & 1))
                }
            };
            prop_assert_eq!(status, expected);
        }
        prop_assert_eq!(content(&folder), model);
    }
}
