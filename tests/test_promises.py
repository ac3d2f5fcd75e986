"""What docs/guarantees.md promises, and the tests that prove it: neither can change without the other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROMISES: dict[str, tuple[str, ...]] = {
    # Objects that change
    "An open file shows one version of its object. After that object is replaced or deleted, reads of "
    "bytes that are not cached fail with ESTALE; the next open reads the new version or fails with "
    "ENOENT.": (
        "tests/mount/test_consistency.py::TestAnOpenHandle::test_is_not_given_the_bytes_of_another_reader",
        "tests/mount/test_consistency.py::"
        "test_many_readers_of_an_object_that_keeps_changing_each_see_one_version",
        "tests/mount/test_consistency.py::TestAnOpenHandle::test_gets_estale_for_what_is_not_cached",
        "tests/mount/test_consistency.py::TestAnOpenHandle::test_a_sequential_reader_gets_one_version_or_estale",
        "tests/mount/test_consistency.py::TestAnOpenHandle::test_of_a_deleted_object_gets_old_bytes_or_estale",
        "tests/mount/test_faults.py::test_an_object_that_changes_while_it_is_read",
        "tests/fs/test_changes.py::test_a_changed_object_is_estale_to_its_handle_and_new_to_the_next",
    ),
    "An open file keeps its attributes and its cached bytes until its last handle is closed, whatever "
    "becomes of its name: `fstat` never fails with ESTALE, and only bytes that cannot be had any more do. "
    "After a removal or a replacement by this node its link count is 0.": (
        "tests/mount/test_open_files.py::test_after_a_change_of_its_name_here",
        "tests/mount/test_open_files.py::test_after_a_change_at_the_origin_that_is_noticed",
        "tests/mount/test_open_files.py::test_bytes_that_the_origin_has_no_more_are_missing_and_nothing_else",
        "tests/fs/test_open_files.py::test_a_local_change_of_its_name",
        "tests/fs/test_open_files.py::test_a_change_at_the_origin",
        "tests/fs/test_open_files.py::test_a_change_that_fstat_itself_notices",
        "tests/fs/test_concurrent_model.py::test_histories",
    ),
    "A program that opens, stats, reads or maps a file which another program of this node replaces by "
    "rename again and again gets one version whole, and no error.": (
        "tests/mount/test_open_files.py::test_a_file_that_is_replaced_again_and_again",
        "tests/fs/test_open_files.py::test_an_open_file_is_opened_again_while_its_name_goes_to_another",
        "tests/fs/test_open_files.py::test_what_a_second_walk_finds_can_be_opened",
    ),
    "A working directory and an open directory go on under the new name when this node renames a directory"
    " above them: what is made, listed and looked up through them is there.": (
        "tests/mount/test_open_files.py::test_a_working_directory_in_a_directory_that_is_renamed",
        "tests/fs/test_open_files.py::test_a_directory_below_one_that_is_renamed",
        "tests/fs/test_open_files.py::test_a_directory_that_is_renamed_while_it_is_read",
    ),
    "A file open in passthrough, and a file that is still mapped, keeps its bytes when it is evicted, "
    "replaced or deleted, and when the daemon stops or dies.": (
        "tests/mount/test_passthrough.py::TestEviction",
        "tests/mount/test_passthrough.py::TestChanges::test_an_open_file_is_its_version_to_the_end",
        "tests/mount/test_passthrough.py::TestChanges::test_a_deleted_object_is_read_to_its_end_and_has_no_name",
        "tests/mount/test_passthrough.py::TestAKilledDaemon",
    ),
    "A change at the origin is seen after `--metadata-ttl` (60 s) by default, at the next open with "
    "`--consistency strict`, and never with `immutable`, not even after a restart.": (
        "tests/mount/test_consistency.py::TestPresets::test_default_sees_a_change_after_its_ttl",
        "tests/mount/test_consistency.py::TestPresets::test_default_sees_new_and_deleted_names_after_their_ttl",
        "tests/mount/test_consistency.py::TestPresets::test_strict_sees_every_change_at_the_next_open",
        "tests/mount/test_consistency.py::TestPresets::test_immutable_never_asks_again",
        "tests/fs/test_costs.py::test_after_the_ttl_one_file_costs_one_head",
    ),
    "When `cachefs refresh PATH` returns, changed, new and deleted objects below PATH are visible; cached"
    " bytes that are still current are not downloaded again.": (
        "tests/mount/test_consistency.py::TestRefresh::test_an_overwritten_object_is_seen_at_once",
        "tests/mount/test_consistency.py::TestRefresh::test_is_done_when_it_returns",
        "tests/mount/test_consistency.py::TestRefresh::test_of_a_directory_means_all_below",
        "tests/mount/test_consistency.py::TestRefresh::test_of_a_missing_name_finds_it_when_it_has_come",
        "tests/mount/test_consistency.py::TestRefresh::test_keeps_cached_bytes_that_are_still_right",
    ),
    "`getfattr -n user.cachefs.refresh` on any path below a mount does what `cachefs refresh` does, for "
    "root and for the owner of the mount's files; listing attributes does not.": (
        "tests/fs/test_changes.py::test_only_the_owner_and_root_refresh_by_attribute",
        "tests/mount/test_consistency.py::TestRefresh::test_is_what_getfattr_says_of_anything_below",
        "tests/mount/test_consistency.py::TestRefresh::test_is_nothing_that_copies_and_listings_of_attributes_do",
    ),
    # Names
    "A listing of 10,000 names costs ten requests. A `stat` of each of them, and a second listing within "
    "the TTL, cost none.": (
        "tests/fs/test_costs.py::test_ls_of_ten_thousand_names_is_ten_lists_and_none_again",
        "tests/mount/test_kernel.py::TestMessages::test_a_second_long_listing_asks_the_store_nothing",
    ),
    "A name that is missing from a listed directory costs no request.": (
        "tests/fs/test_costs.py::test_missing_names_in_a_listed_directory_cost_nothing",
        "tests/mount/test_kernel.py::TestMessages::test_a_missing_name_in_a_listed_directory_costs_no_request",
    ),
    "A listing that the origin does not finish fails with EIO or EACCES: it never shows a shorter "
    "directory or a missing file.": (
        "tests/mount/test_faults.py::test_a_failing_listing_is_an_errno_and_no_absence",
        "tests/fs/test_changes.py::test_a_listing_that_keeps_failing_never_looks_complete",
        "tests/fs/test_changes.py::test_a_failure_is_never_an_absence",
    ),
    "Keys that no path can name (`..`, `a//b`, components above 255 bytes, an object beside a directory "
    "of the same name) are hidden, counted and logged. No path leads out of the mount.": (
        "tests/mount/test_keys.py::test_the_listing_is_exactly_what_the_rules_say",
        "tests/mount/test_keys.py::test_no_path_leads_to_a_hidden_key",
        "tests/mount/test_keys.py::test_hidden_keys_are_counted_and_told",
        "tests/fs/test_keys.py::test_rule",
    ),
    # Reading
    "Ten processes that read one cold object download it once.": (
        "tests/mount/test_kernel.py::TestMessages::test_ten_processes_reading_one_cold_object_cost_as_much_as_one",
        "tests/fetch/test_transfers.py::test_ten_readers_of_one_cold_object_cost_what_one_costs",
    ),
    "Reading a file in the page cache again sends no READ message to the daemon; a small one sends one "
    "OPEN and one RELEASE and nothing else.": (
        "tests/mount/test_kernel.py::TestMessages::test_a_warm_file_is_read_again_without_a_read_message",
        "tests/mount/test_kernel.py::TestMessages::test_a_warm_small_file_costs_one_open_and_one_release",
    ),
    "On the native backend, a file that is whole and verified on one tier (where it can be written, on SSD) when it is"
    " opened is read without a READ message, in any access pattern and after the kernel drops its pages.": (
        "tests/mount/test_descriptors.py::TestWhatItCosts::test_nothing_where_nothing_is_written",
        "tests/mount/test_passthrough.py::TestWholeFiles::test_are_read_without_the_daemon",
        "tests/mount/test_passthrough.py::TestWholeFiles::test_of_every_size",
        "tests/mount/test_passthrough.py::test_a_file_that_lies_in_ram_and_on_ssd_is_gathered_and_then_read_without_the_daemon",
        "tests/mount/test_kernel.py::TestMessages::test_a_whole_file_is_read_without_a_read_message_when_the_kernel_has_no_page_of_it",
    ),
    "On the native backend, a signal that ends a process ends that process's blocked read within a second"
    " and no other reader's; a signal that ends no process makes no request fail.": (
        "tests/mount/test_passthrough.py::TestSignals",
    ),
    "With `--zero-open`, files send no OPEN and no RELEASE after the first one, and `cachefs refresh` "
    "still shows changes.": ("tests/mount/test_passthrough.py::TestZeroOpen",),
    "When the origin fails (503, no answer, truncated bodies, resets), a read returns the right bytes, or"
    " an errno once no byte has arrived for `--timeout`.": (
        "tests/mount/test_faults.py::test_a_read_takes_one_timeout_at_most",
        "tests/mount/test_faults.py::test_a_reader_gets_right_bytes_or_an_errno_in_time",
        "tests/mount/test_faults.py::test_a_store_that_goes_away_and_comes_back",
        "tests/origin/test_wrapper.py::test_progress_renews_the_budget_and_silence_uses_it_up",
    ),
    "Bytes that were changed on their way from the origin reach no reader where they are compared: whole "
    "objects of up to 1 MiB with an MD5 as etag, up to 24 MiB a second; with `--verify full` "
    "all of up to 4 MiB.": (
        "tests/origin/test_md5.py::test_bytes_that_were_changed_on_their_way_are_fetched_again",
        "tests/origin/test_md5.py::test_the_small_file_of_a_mount_is_compared_before_its_reader_has_any_of_it",
        "tests/origin/test_md5.py::test_which_objects_are_compared",
        "tests/origin/test_md5.py::test_beyond_its_share_of_a_processor_only_some_are_compared",
    ),
    "While the origin is down, cached data is read as before; one file that hangs delays no other file.": (
        "tests/mount/test_faults.py::test_an_outage_does_not_disturb_cached_data",
        "tests/mount/test_faults.py::test_a_store_that_hangs_does_not_hold_up_other_files",
    ),
    "Expired credentials give EACCES and a log line that says so; renewed credentials work at once, "
    "without a remount.": (
        "tests/mount/test_faults.py::TestCredentials::test_expired_ones_are_eacces_and_renewed_ones_work_at_once",
        "tests/mount/test_faults.py::TestCredentials::"
        "test_new_keys_in_the_credentials_file_are_taken_without_a_restart",
        "tests/origin/test_faults.py::test_expired_credentials_and_their_renewal",
    ),
    "With `--read-only`, every attempt to write fails with EROFS and changes nothing.": (
        "tests/mount/test_readonly.py::TestWriting::test_every_write_is_refused_as_read_only",
        "tests/mount/test_readonly.py::TestWriting::test_nothing_is_changed_by_trying",
    ),
    "An origin that does not answer at all is detected within seconds and logged once. Cached names are "
    "then used beyond their TTL, or requests fail, or readers wait (`--on-outage "
    "serve-stale|eio|wait=30s`); no request hangs, and recovery needs no action. A mount also starts "
    "during an outage, with the names it has cached.": (
        "tests/mount/test_outage.py::test_a_store_that_is_stopped_for_a_while",
        "tests/mount/test_outage.py::test_a_mount_starts_without_its_store_and_shows_what_it_knows",
        "tests/mount/test_outage.py::test_a_reader_may_wait_for_the_store",
    ),
    # Writing
    "When the last `close`, or an `fsync`, returns 0, the origin has the whole file. A small file costs "
    "one PUT and nothing else; a large file is sent in parts while it is written; no reader elsewhere "
    "sees it before that.": (
        "tests/mount/test_writing.py::TestContent::test_a_small_file_is_one_request",
        "tests/mount/test_writing.py::TestContent::test_a_large_file_goes_in_parts_and_is_read_back_from_here",
        "tests/mount/test_writing.py::TestContent::test_fsync_in_the_middle",
        "tests/mount/test_writing.py::TestKilled::test_durably_what_was_closed_is_there_and_the_rest_is_not",
        "tests/fs/test_writing_costs.py::test_costs_in_a_known_tree",
    ),
    "With `--writeback`, `close` and `fsync` return when the file is on this node's disk. It survives "
    "`kill -9` of the daemon at any moment, and the next mount uploads it.": (
        "tests/mount/test_writing.py::TestWriteback::test_it_is_here_at_once_and_there_later",
        "tests/mount/test_writing.py::TestKilled::test_what_was_acknowledged_comes_back",
        "tests/mount/test_writing.py::TestKilled::test_at_any_moment",
        "tests/mount/test_writing_crash.py::TestAtAnyMoment::test_writeback",
    ),
    "`close` and `fsync` report a failed upload. The file is kept and retried, `cachefs status` shows it,"
    " and `cachefs flush` and `umount --flush` wait for it.": (
        "tests/mount/test_writing.py::TestFailures::test_a_close_says_what_the_store_says",
        "tests/mount/test_writing.py::TestFailures::test_fsync_says_it_too",
        "tests/mount/test_writing.py::TestWriteback::test_only_what_is_below_a_path",
        "tests/mount/test_writing.py::TestWriteback::test_unmounting_that_must_not_leave_anything",
        "tests/mount/test_writing_crash.py::TestDurable::test_after_a_close_that_failed",
    ),
    "All descriptors and mappings of a file on one node see one content under one inode number, whichever was opened"
    " first, and their locks meet: a reader sees what a later writer appends, patches or truncates.": (
        "tests/mount/test_descriptors.py::TestAReaderThatWasThereBefore::test_sees_the_change",
        "tests/mount/test_descriptors.py::TestAReaderThatWasThereBefore::test_follows_a_log",
        "tests/mount/test_descriptors.py::TestLocks::test_of_flock_meet",
        "tests/mount/test_descriptors.py::TestLocks::test_of_fcntl_meet",
        "tests/mount/test_descriptors.py::TestDatabases::test_sqlite_with_a_reader_that_came_first",
    ),
    "Reading back what was written on this node sends no request to the origin.": (
        "tests/mount/test_writing.py::TestContent::test_a_large_file_goes_in_parts_and_is_read_back_from_here",
        "tests/store/test_adopting.py::test_what_was_adopted_is_passthrough_and_read_at_once",
    ),
    "A temporary file that is renamed over another file costs one upload, and with `--writeback` no copy;"
    " a reader sees the old file or the new one.": (
        "tests/mount/test_writing.py::TestNames::test_written_beside_and_renamed_over",
        "tests/mount/test_writing.py::TestWriteback::test_temporary_files_are_never_uploaded",
        "tests/mount/test_writing_crash.py::TestWriteback::test_renamed_before_it_was_sent",
    ),
    "No crash of any process leaves a partial object visible, or, after the next start, an interrupted "
    "upload at the origin.": (
        "tests/mount/test_writing_crash.py::TestAtAnyMoment::test_durable",
        "tests/mount/test_writing_crash.py::TestAtAnyMoment::test_writeback",
        "tests/mount/test_writing_crash.py::TestAtAnyMoment::test_pyfuse3",
        "tests/mount/test_writing_crash.py::TestDurable",
        "tests/mount/test_writing_crash.py::TestWriteback",
        "tests/mount/test_writing_crash.py::TestNames",
    ),
    "cp, mv, tar, rsync, git, sqlite, pip, pandas, safetensors and `torch.save` work as on a local disk, "
    "including memory maps and random writes.": (
        "tests/mount/test_writing_programs.py::TestTools::test_cp",
        "tests/mount/test_writing_programs.py::TestTools::test_mv_into_within_and_out",
        "tests/mount/test_writing_programs.py::TestTools::test_tar",
        "tests/mount/test_writing_programs.py::TestTools::test_rsync",
        "tests/mount/test_writing_programs.py::TestTools::test_git",
        "tests/mount/test_writing_programs.py::TestLibraries::test_sqlite",
        "tests/mount/test_writing_programs.py::TestLibraries::test_pip",
        "tests/mount/test_writing_programs.py::TestLibraries::test_parquet",
        "tests/mount/test_writing_programs.py::TestLibraries::test_safetensors",
        "tests/mount/test_writing_programs.py::TestLibraries::test_a_checkpoint_saved_beside_and_renamed_over",
        "tests/mount/test_writing.py::TestContent::test_mapped",
        "tests/mount/test_writing.py::TestContent::test_written_at_random_and_read_meanwhile",
    ),
    "A full cache disk is ENOSPC to the writer and has no effect on other programs.": (
        "tests/upload/test_trouble.py::test_a_full_disk_is_an_error_to_who_writes_and_to_nobody_else",
    ),
    "So is a full disk under a `file://` source; a file larger than that whole disk is EFBIG at once.": (
        "tests/mount/test_pressure.py::test_a_full_origin",
        "tests/mount/test_pressure.py::test_a_file_that_no_part_of_the_origins_disk_could_hold",
    ),
    "Where the next daemon goes on after a kill, it does so on a full cache disk, too: it reads and "
    "uploads what was acknowledged.": (
        "tests/mount/test_restart.py::test_small_files_that_the_journal_alone_has_go_on_while_the_disk_is_full",
        "tests/upload/test_contents.py::test_a_start_on_a_full_disk_has_contents_in_memory",
        "tests/upload/test_outliving.py"
        "::test_an_open_file_that_lies_in_memory_stays_there_while_the_disk_is_full",
    ),
    "Unsent files left by a crash or by another version are never dropped: a journal that cannot be read "
    "is refused with a one-line error.": (
        "tests/mount/test_upgrade.py::test_uploads_that_another_version_has_noted_are_not_touched",
        "tests/mount/test_writing.py::TestKilled::test_what_was_acknowledged_comes_back",
    ),
    # Prefetch and warm-up
    "If all small files of a directory are read, in any order, each costs one GET; if a twentieth of them"
    " is read, at most a tenth of the directory is fetched in vain.": (
        "tests/mount/test_ahead.py::TestDirectories::test_all_files_in_any_order_cost_one_get_each",
        "tests/mount/test_ahead.py::TestDirectories::test_a_twentieth_costs_at_most_a_tenth",
        "tests/prefetch/test_prefetcher.py::test_a_shuffled_epoch_fetches_each_file_once_and_in_time",
    ),
    "Shards that are read in a stride are fetched once each, and the next one before it is opened; "
    "reading only footers and metadata fetches little more than that.": (
        "tests/mount/test_ahead.py::TestShards::test_the_next_of_a_stride_comes_before_it_is_opened",
        "tests/mount/test_ahead.py::TestShards::test_workers_that_stride_have_each_shard_fetched_once",
        "tests/mount/test_ahead.py::TestTables::test_only_what_is_read_through_is_fetched_ahead",
    ),
    "Files that a job announced with hints are cached before the job opens them, in its order, also after"
    " a restart of the daemon; a wrong hint costs requests and never gives wrong bytes.": (
        "tests/mount/test_ahead.py::TestHints::test_what_was_announced_is_there_before_any_open",
        "tests/mount/test_ahead.py::TestHints::test_an_order_is_followed_and_known_to_the_next_daemon",
        "tests/mount/test_ahead.py::TestHints::test_a_wrong_hint_costs_requests_and_no_byte",
        "tests/mount/test_ahead.py::TestHints::test_a_training_loop_that_announces_finds_its_files",
        "tests/prefetch/test_prefetcher.py::test_every_open_of_a_hinted_order_finds_its_file_whole",
        "tests/prefetch/test_prefetcher.py::test_ranks_have_their_turns",
    ),
    "With `--prefetch off`, only files that are opened are fetched.": (
        "tests/mount/test_ahead.py::TestOff::test_nothing_but_what_is_opened_is_fetched",
    ),
    "A cache of half a dataset answers half of its reads in every epoch, with shuffled files, shuffled "
    "shards or a repeated scan; another dataset takes over within two epochs.": (
        "tests/store/test_epochs_in_the_store.py::test_half_of_many_small_files_is_half_the_hits",
        "tests/store/test_epochs_in_the_store.py::test_shards_read_in_pieces_by_a_sequential_reader",
        "tests/store/test_epochs_in_the_store.py::test_another_dataset_takes_over_within_two_epochs",
        "tests/test_simulate.py::test_half_a_dataset_cached_is_half_the_hits",
    ),
    "`cachefs warm` fetches what is missing, names what failed, evicts nothing that is pinned or that it "
    "fetched itself, and continues where it was interrupted; it refuses what does not fit.": (
        "tests/mount/test_warm.py::test_what_is_warm_asks_the_store_for_nothing",
        "tests/mount/test_warm.py::test_failures_are_named_and_the_rest_comes",
        "tests/mount/test_warm.py::test_more_than_the_cache_holds_is_refused_and_displaces_nothing",
        "tests/mount/test_warm.py::test_what_a_job_finds_is_not_displaced_by_what_it_brings",
        "tests/test_warming.py::test_a_job_that_was_ended_is_gone_on_with",
    ),
    "Pinned files stay cached under pressure and across restarts, and pins have a budget.": (
        "tests/mount/test_warm.py::test_pins_survive_pressure_and_a_restart",
        "tests/mount/test_warm.py::test_pins_have_a_budget",
        "tests/store/test_epochs_in_the_store.py::test_pins_survive_pressure_and_restarts",
    ),
    # Several nodes
    "When four nodes read a whole dataset, each in its own order, the origin sends each byte once.": (
        "tests/cluster/test_sharing.py::test_four_nodes_read_everything_and_the_store_sends_it_once",
    ),
    "A node that is killed, stopped, partitioned from one or all other nodes, or joining under load makes"
    " no read fail and no read wrong.": (
        "tests/cluster/test_trouble.py::test_an_owner_is_killed_while_it_sends_and_returns",
        "tests/cluster/test_trouble.py::test_a_peer_hangs_and_goes_on",
        "tests/cluster/test_trouble.py::test_a_node_joins_while_all_others_read",
        "tests/cluster/test_trouble.py::test_two_nodes_do_not_reach_each_other",
        "tests/cluster/test_trouble.py::test_a_node_is_cut_off_from_everything",
        "tests/cluster/test_far.py::test_a_slow_and_lossy_network_costs_time_and_little_else",
    ),
    "A node that sends wrong bytes or lengths, stalls, resets or never ends its headers is not used: its "
    "answers are discarded and fetched elsewhere.": (
        "tests/cluster/test_liars.py::test_who_lies_is_not_believed",
        "tests/peers/test_liars.py::test_whatever_a_peer_says_is_right_or_a_failure",
    ),
    "Members join and leave correctly while the etcd leader changes.": (
        "tests/cluster/test_etcd.py::test_members_come_and_go_and_so_does_the_leader_of_etcd",
    ),
    "Unauthenticated clients get nothing: without a key or certificates a daemon listens on the loopback "
    "only, a signed request is valid once and for one node, and a client without a certificate of the "
    "cluster's CA is refused.": (
        "tests/peers/test_auth.py::test_elsewhere_strangers_must_be_kept_out",
        "tests/peers/test_auth.py::test_a_signed_request_is_taken_once",
        "tests/peers/test_auth.py::test_a_signature_is_for_one_request_to_one_node",
        "tests/peers/test_tls.py::test_whoever_has_no_certificate_of_the_ca_is_not_served",
        "tests/mount/test_peers.py::test_with_a_key_strangers_get_nothing",
    ),
    # The cache
    "After a restart, nothing that the SSD tier has room for is downloaded again, at the same mountpoint "
    "or at another.": (
        "tests/mount/test_lifecycle.py::TestWarmAfterRestart::test_a_clean_restart_asks_for_no_byte_again",
        "tests/mount/test_lifecycle.py::TestWarmAfterRestart::test_the_cache_is_found_at_another_mountpoint",
    ),
    "After `kill -9` in the middle of downloads every byte is right, and most of what was cached needs no"
    " second download.": (
        "tests/mount/test_crash.py::test_after_kills_during_fills_every_byte_is_right",
        "tests/store/test_kill.py::test_kills_in_the_middle_of_transfers_never_make_a_wrong_byte",
    ),
    "Damaged cache files are detected and fetched again; a damaged index costs the cache, not the mount.": (
        "tests/mount/test_crash.py::test_damage_in_the_cache_is_never_read",
        "tests/mount/test_crash.py::test_a_damaged_index_costs_the_cache_and_not_the_mount",
        "tests/store/test_index_damage.py::test_random_bit_flips_in_the_index",
    ),
    "Damage that is older than a file's registration with the kernel is never read through passthrough; "
    "with `--verify full` no file is registered.": ("tests/mount/test_passthrough.py::TestDamage",),
    "A tier never holds more than its limit, and with a cache of any size, or none, every read is "
    "answered.": (
        "tests/store/test_tier_accounting.py::test_counted_bytes_are_the_disks_bytes_and_never_pass_the_cap",
        "tests/mount/test_pressure.py::test_a_tiny_cache_counts_what_it_holds",
        "tests/mount/test_pressure.py::test_a_hundred_readers_over_a_cache_of_a_twentieth",
        "tests/mount/test_pressure.py::test_tiers_can_be_left_out",
        "tests/fetch/test_small_caches.py::test_any_read_the_kernel_can_send_is_answered",
    ),
    "A cache disk that is read-only, full from the start, filled by other programs, or gone makes reads "
    "slower and makes none fail.": (
        "tests/mount/test_pressure.py::TestDisks::test_a_read_only_cache_directory",
        "tests/mount/test_pressure.py::TestDisks::test_a_cache_directory_that_becomes_read_only",
        "tests/mount/test_frozen_writes.py::"
        "test_what_was_acknowledged_is_read_and_sent_from_a_disk_that_takes_no_writes",
        "tests/mount/test_pressure.py::TestDisks::test_a_disk_that_is_full_from_the_start",
        "tests/mount/test_pressure.py::TestDisks::test_a_disk_that_others_fill",
        "tests/mount/test_pressure.py::test_a_cache_directory_that_vanishes_while_it_is_read",
    ),
    "Reading a gibibyte grows the daemon's own memory by less than 100 MiB; listing a million names, by "
    "less than 130 MB.": (
        "tests/mount/test_memory.py::test_a_gibibyte_goes_through_sixty_four_mebibytes",
        "tests/fs/test_memory.py::test_a_million_names_in_a_flat_memory",
    ),
    # Failures
    "A power cut at any moment leaves a cache that the next mount can use, and loses nothing that was "
    "acknowledged.": (
        "tests/test_database.py::test_a_power_cut_at_any_moment_leaves_a_database_that_opens",
        "tests/mount/test_powercut.py::test_what_was_acknowledged_survives_a_cut",
        "tests/test_database.py::test_after_failed_writes_all_that_was_acknowledged_is_readable",
    ),
    "After a failed fsync no later fsync reports the same bytes as safe.": (
        "tests/upload/test_disk.py::test_a_failed_fsync_is_not_followed_by_one_that_says_it_is_safe",
    ),
    "When a disk operation for one file fails, one operation gets an errno; the daemon goes on.": (
        "tests/upload/test_disk.py::test_a_file_that_cannot_be_opened_fails_alone",
        "tests/upload/test_disk.py::test_a_bug_in_the_task_of_one_file_ends_nothing_else",
        "tests/mount/test_injection.py::test_a_call_that_fails_ends_no_daemon_and_loses_nothing",
    ),
    "When the database of names is cut short under a mount, requests of that moment get EIO, and the names "
    "are learnt again. In the middle of a transaction that ends the daemon (SIGBUS). The next one, where there is "
    "one, learns the names again; directories that were open then give ESTALE.": (
        "tests/fs/test_lost_names.py::test_names_are_learnt_again",
        "tests/fs/test_lost_names.py::test_a_reader_of_a_directory_is_told_and_never_sees_a_shorter_one",
        "tests/fs/test_lost_names.py::test_what_is_being_written_stays",
        "tests/mount/test_lost_names.py::test_names_are_learnt_again",
        "tests/mount/test_lost_names.py::test_the_next_daemon_goes_on_where_one_ends_of_that",
    ),
    "Where no thread can be started for a while (a container's limit of processes), operations get an errno; "
    "the daemon goes on, and all is as before afterwards.": (
        "tests/mount/test_injection.py::test_a_call_that_fails_ends_no_daemon_and_loses_nothing",
        "tests/test_tasks.py::test_a_staging_file_goes_once_a_thread_starts",
    ),
    "A daemon that ends because of a failure leaves its mount dead (ENOTCONN), not a bare directory that "
    "programs could write to.": (
        "tests/mount/test_dead_mount.py::test_a_daemon_that_a_failure_ends_leaves_no_bare_directory",
    ),
    "A start over a dead mount that is refused, or fails before it is ready, leaves a dead mount.": (
        "tests/mount/test_dead_mount.py::test_a_start_that_is_refused_leaves_the_dead_mount",
        "tests/fuse/test_choice.py::test_the_mountpoint_is_cleared_when_only_mounting_is_left",
    ),
    "Where root mounts (native backend, Linux 6.9), when the daemon is killed or fails, no program gets an errno: "
    "opens, reads, writes, mappings, stats and directory streams wait, and go on with the next daemon. Changes of "
    "names are made once. A file that is being written has all that was written, and a close or fsync that was not "
    "answered is made again.": (
        "tests/fuse/test_repeated.py::test_a_request_that_was_not_answered_is_answered_by_the_next_daemon",
        "tests/mount/test_repeated.py::test_no_program_notices",
        "tests/mount/test_repeated.py::test_killed_at_each_step_of_taking_over",
        "tests/mount/test_restart.py::test_two_kills_at_once",
        "tests/mount/test_restart.py::test_no_writer_notices",
        "tests/mount/test_restart.py::test_a_file_that_is_being_written_goes_on",
        "tests/mount/test_restart.py::test_a_call_that_waits_for_the_upload_is_answered_by_the_next_daemon",
        "tests/mount/test_restart.py::test_a_file_that_has_lost_its_name_goes_on",
        "tests/mount/test_restart.py::test_a_mapping_that_is_written_goes_on",
        "tests/test_shared_memory.py::test_a_kill_loses_no_row",
        "tests/upload/test_outliving.py::test_killed_at_each_request_and_each_commit_of_the_journal",
        "tests/mount/test_restart.py::test_who_reads_what_waits_for_its_upload_goes_on",
        "tests/mount/test_restart.py::test_a_plain_mount_outlives_its_daemon",
        "tests/mount/test_restart.py::test_no_reader_notices_that_the_daemon_was_killed",
        "tests/mount/test_restart.py::test_a_read_that_waits_for_the_origin_is_answered_by_the_next_daemon",
        "tests/mount/test_restart.py::test_a_failure_in_the_daemon_is_a_death_like_any_other",
    ),
    "`cachefs upgrade` has the version that is installed now go on with such a mount: "
    "no program gets an errno, also none that writes, and what is cached stays, in memory too. If that version does "
    "not start, or cannot go on with what is open, nothing changes.": (
        "tests/fuse/test_state.py::test_what_a_version_has_left_is_read_or_refused_by_its_number",
        "tests/mount/test_restart.py::test_an_upgrade_that_meets_a_kill_goes_on_or_says_why_not",
        "tests/mount/test_restart.py::test_no_writer_notices",
        "tests/mount/test_restart.py::test_what_the_next_daemon_would_not_find_is_not_handed_over",
        "tests/mount/test_restart.py::test_no_reader_notices_an_upgrade_and_what_is_in_memory_stays",
        "tests/mount/test_restart.py::test_an_upgrade_runs_what_is_installed_now_or_changes_nothing",
        "tests/mount/test_restart.py::test_a_mount_that_ends_with_its_daemon_is_not_upgraded",
    ),
    "After ten daemons in a row that each lived for less than ten seconds none is started again, and "
    "the mount stays dead; a stop or an unmount also ends the process that would start it.": (
        "tests/mount/test_restart.py::test_a_crash_loop_ends_with_a_dead_mount",
        "tests/mount/test_restart.py::test_everything_ends_with_the_mount",
        "tests/mount/test_restart.py::test_a_holder_without_its_daemon_unmounts_when_it_is_told_to_stop",
    ),
    "Under the systemd unit, no program gets an errno either when the holder or all processes of the "
    "unit are killed, or when the watchdog ends a daemon that hangs; a stop leaves no descriptor with systemd.": (
        "tests/mount/test_restart.py::test_a_service_manager_keeps_the_connection_of_a_holder_that_is_killed",
        "tests/mount/test_restart.py::test_what_hangs_is_ended_by_the_service_manager_and_gone_on_with",
        "tests/mount/test_restart.py::test_under_a_service_manager_no_daemon_outlives_its_holder",
        "tests/mount/test_restart.py::test_what_a_service_manager_keeps_of_a_mount_that_has_gone_is_not_gone_on_with",
        "tests/mount/test_restart.py::test_a_crash_loop_of_holders_ends_and_nothing_is_kept",
    ),
    "Staging files that are in no journal are kept aside and reported, and `cachefs recover` copies them "
    "back.": (
        "tests/upload/test_orphans.py::test_without_a_journal_all_files_are_kept_aside",
        "tests/upload/test_orphans.py::test_a_start_that_dies_before_it_looked_loses_nothing",
        "tests/upload/test_orphans.py::test_a_mount_that_cannot_be_written_makes_no_journal",
        "tests/upload/test_orphans.py::test_another_journal_does_not_account_for_what_was_acknowledged",
        "tests/upload/test_orphans.py::test_what_is_none_of_ours_is_not_removed",
        "tests/upload/test_orphans.py::test_a_crash_leaves_nothing_aside",
        "tests/upload/test_orphans.py::test_a_renamed_file_has_its_new_name",
        "tests/upload/test_orphans.py::test_no_extended_attributes_cost_names_and_no_bytes",
        "tests/upload/test_orphans.py::test_a_journal_that_cannot_be_read_names_the_verb",
        "tests/upload/test_orphans.py::test_files_are_listed",
        "tests/upload/test_orphans.py::test_files_are_copied_and_nothing_is_replaced",
        "tests/upload/test_orphans.py::test_a_name_that_leads_elsewhere_is_refused",
        "tests/upload/test_orphans.py::test_files_of_a_running_daemon_are_left_to_it",
        "tests/upload/test_orphans.py::test_what_is_no_cache_is_refused",
    ),
    "A cache disk that hangs takes its tier down after 5 s: reads go to the origin, and a stop still ends"
    " the mount.": (
        "tests/mount/test_hanging_disk.py::test_a_mount_goes_on_and_ends_without_its_disk",
        "tests/mount/test_hanging_disk.py::test_a_stop_needs_no_disk",
        "tests/mount/test_hanging_disk.py::test_a_disk_that_answers_again_is_used_again",
        "tests/mount/test_hanging_disk.py::test_cached_files_that_cannot_be_read_come_from_the_origin",
        "tests/mount/test_hanging_disk.py::test_a_full_cache_needs_no_disk_to_evict",
    ),
    "While a cache disk hangs, only processes that write or sync a file wait for it; a change of a name or mode may get"
    " EIO after 5 s. All others are answered, and what was acknowledged is there afterwards.": (
        "tests/mount/test_frozen_writes.py::test_only_who_needs_the_disk_waits_for_it",
        "tests/mount/test_frozen_writes.py::test_a_kill_while_the_disk_is_frozen_loses_nothing_acknowledged",
        "tests/mount/test_frozen_writes.py::test_a_stop_does_not_wait_for_what_is_written",
    ),
    "Waiting writes and reads delay no other request.": (
        "tests/fuse/test_writing.py::test_writes_that_wait_hold_up_nothing_else",
        "tests/fuse/test_waiting.py::test_requests_are_read_however_many_wait",
        "tests/mount/test_faults.py::test_reads_that_wait_hold_up_nothing_else",
    ),
    "Setting the clock back keeps nothing valid beyond `--metadata-ttl`.": (
        "tests/fs/test_clock_steps.py::test_no_step_extends_what_is_shown_beyond_the_ttl",
    ),
    "A peer that is much slower than the origin is abandoned after seconds; the origin delivers the rest.": (
        "tests/peers/test_pace.py::test_a_peer_as_slow_as_the_origin_is_not_too_slow",
        "tests/peers/test_pace.py::test_a_peer_that_is_clearly_slower_is_given_up_by_the_time_it_may_take",
        "tests/peers/test_pace.py::test_nothing_is_judged_early",
        "tests/peers/test_pace.py::test_the_two_peers_of_the_report_are_too_slow_however_little_is_known_of_the_origin",
        "tests/peers/test_pace.py::test_the_rate_of_the_origin_is_one_of_those_that_were_seen",
        "tests/peers/test_pace.py::test_a_byte_a_second_is_given_up_after_seconds",
        "tests/peers/test_pace.py::test_a_byte_a_second_is_given_up_within_the_patience_of_a_short_timeout",
        "tests/peers/test_pace.py::test_a_peer_on_a_slow_network_is_waited_for_as_long_as_the_origin_would_take",
        "tests/peers/test_pace.py::test_what_came_before_a_long_body_became_slow_is_kept",
        "tests/peers/test_pace.py::test_a_sink_that_is_slow_is_not_the_peers_fault",
        "tests/peers/test_pace.py::test_the_origin_takes_over_the_rest_and_the_slow_peer_is_left_alone",
        "tests/peers/test_pace.py::test_a_slow_network_leaves_the_peer_healthy",
    ),
    # Permissions and security
    "Everything a mount stores is accessible to its owner only, with any umask and for files that existed"
    " before; another user's cache directory is refused.": (
        "tests/mount/test_ownership.py::test_all_that_is_kept_is_for_its_owner",
        "tests/mount/test_ownership.py::test_the_cache_of_another_user_is_refused",
    ),
    "No user can fill the log, or send control characters to a terminal, through object names.": (
        "tests/mount/test_ownership.py::test_names_reach_no_terminal_through_the_log",
        "tests/test_cli.py::test_a_terminal_obeys_no_name",
        "tests/test_cli.py::test_no_verb_prints_but_through_say",
    ),
    "A verb that root runs talks to no socket that another user can listen on, and `umount` removes only "
    "the mount it was started for.": (
        "tests/test_control.py::test_the_socket_of_another_user_is_not_asked",
        "tests/test_cli.py::test_another_mount_is_not_taken_away",
    ),
    "A peer that has the key and sends bytes that differ from the origin's is found by sampling and not "
    "used again.": (
        "tests/peers/test_comparing.py::test_a_peer_that_sends_other_bytes_is_found_and_asked_no_more",
        "tests/peers/test_comparing.py::test_an_honest_peer_is_compared_and_stays",
        "tests/peers/test_comparing.py::test_a_whole_object_with_an_md5_is_checked_without_the_origin",
        "tests/peers/test_comparing.py::test_etags_that_only_look_like_md5_say_nothing",
        "tests/peers/test_comparing.py::test_what_is_compared_is_a_small_part_and_no_peer_knows_which",
        "tests/peers/test_comparing.py::test_a_block_of_a_long_delivery_is_any_of_it",
    ),
    "A rename never mixes two versions of an object, also at an origin that ignores the conditions of a "
    "copy.": (
        "tests/origin/test_conditions.py::test_a_copy_is_of_the_version_that_was_asked_for",
        "tests/origin/test_conditions.py::test_a_copy_in_parts_is_of_one_version",
        "tests/upload/test_ceph.py::test_a_copy_under_another_clients_overwrite_takes_nothing_of_theirs",
    ),
    # Starting and stopping
    "`cachefs mount` returns when the mount answers, or fails with a one-line reason and leaves nothing "
    "mounted or running.": (
        "tests/mount/test_lifecycle.py::TestStarting::test_mount_returns_when_the_mount_answers",
        "tests/mount/test_refusals.py::TestMountpoint",
        "tests/mount/test_refusals.py::TestStore",
        "tests/mount/test_refusals.py::TestMachine",
    ),
    "`cachefs mount -f SOURCE /dev/fd/N` serves a mount that another process made, needs no privilege, "
    "and leaves the unmounting to that process.": (
        "tests/mount/test_passed_descriptor.py::TestServing",
        "tests/mount/test_passed_descriptor.py::TestRefusals",
    ),
    "Across a restart or crash of the daemon, programs continue to read files open in passthrough; other "
    "handles get ENOTCONN, unless the daemon of a mount that outlives it crashed or was upgraded.": (
        "tests/mount/test_upgrade.py::test_what_programs_see_of_a_restart",
    ),
    "Counters are consistent with each other and with what the origin saw; the output of `cachefs doctor`"
    " contains no secret.": (
        "tests/mount/test_watching.py::test_metrics_are_what_the_store_has_seen",
        "tests/mount/test_watching.py::test_two_nodes_account_for_every_byte_and_wait",
        "tests/mount/test_watching.py::test_doctor_finds_the_store_and_tells_no_secret",
        "tests/observe/test_identities.py::test_counters_add_up",
    ),
    "`--fuse auto` uses pyfuse3 where the native backend cannot run, and status and log say why; `--fuse "
    "native` fails there with a one-line error.": (
        "tests/mount/test_refusals.py::TestMachine::test_a_user_is_told_which_backend_serves_and_why",
        "tests/mount/test_refusals.py::TestMachine::test_what_fusermount3_refuses_is_said",
    ),
    "A cache directory belongs to one daemon: a second daemon is refused with a one-line error and does "
    "not disturb the first.": (
        "tests/mount/test_lifecycle.py::TestDying::test_the_answer_to_a_second_daemon_is_one_line",
        "tests/store/test_restart.py::test_a_second_daemon_on_the_same_directory_is_refused",
    ),
    "The next `cachefs mount` or `cachefs umount` cleans up a mount whose daemon has died.": (
        "tests/mount/test_lifecycle.py::TestDying::test_a_start_over_a_dead_mount_cleans_it",
        "tests/mount/test_lifecycle.py::TestDying::test_a_dead_mount_is_explained_and_can_be_taken_away",
        "tests/mount/test_lifecycle.py::TestDying::test_a_dead_mount_with_an_open_file_is_taken_away_too",
    ),
    "A busy mount stays mounted and `cachefs umount` names the processes that use it; with `--lazy` they "
    "can read until they close their files.": (
        "tests/mount/test_lifecycle.py::TestEnding::test_a_busy_mount_stays_and_its_users_are_named",
        "tests/mount/test_lifecycle.py::TestEnding::"
        "test_lazily_with_an_open_file_the_file_can_be_read_to_its_end",
    ),
    "`umount`, `fusermount3 -u`, SIGTERM and SIGINT end a mount as cleanly as `cachefs umount`: the SSD "
    "tier stays warm, no memory stays in use, and a process that waits for the origin gets an errno "
    "within seconds.": (
        "tests/mount/test_lifecycle.py::TestEnding::test_every_way_is_clean_and_keeps_the_cache",
        "tests/mount/test_lifecycle.py::TestEnding::test_signals_end_a_foreground_mount",
        "tests/mount/test_lifecycle.py::TestMemoryAfterwards",
        "tests/mount/test_lifecycle.py::TestDying::test_readers_that_wait_get_an_errno",
    ),
    "The demo reads everything twice, compares every byte, sends no request the second time, and leaves "
    "nothing behind.": (
        "tests/test_cli.py::test_the_demo",
        "tests/test_cli.py::test_the_demo_tells_what_differs",
    ),
}
"""A promise, as docs/guarantees.md has it → the tests that prove it."""


def promises_of(page: str) -> list[str]:
    """The bullets between the page's marks, each on one line."""
    section = re.search(r"<!-- guarantees -->\n(.*?)<!-- /guarantees -->", page, re.DOTALL)
    assert section, "the page has lost its marks"
    found: list[str] = []
    for line in section[1].splitlines():
        if line.startswith("- "):
            found.append(line[2:])
        elif line.startswith("  ") and found:
            found[-1] += " " + line.strip()
        elif found:  # a promise in any other form would escape the table
            assert not line or re.fullmatch(r"## [^#]+", line), f"neither a bullet nor a heading: {line!r}"
    return found


Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@cache
def module(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def definitions(node: str) -> list[Definition]:
    """The classes and the function that `path::Class::test` goes through; fails where one is not there."""
    path, *names = node.split("::")
    assert re.fullmatch(r"tests/(\w+/)?test_\w+\.py", path) and names, f"not a test's name: {node}"
    assert (ROOT / path).is_file(), f"no such file: {node}"
    found: list[Definition] = []
    place: ast.Module | Definition = module(path)
    for name in names:
        assert name.startswith(("test", "Test")), f"pytest does not collect {name}: {node}"
        here = [one for one in place.body if isinstance(one, Definition) and one.name == name]
        assert len(here) == 1, f"{name} is there {len(here)} times: {node}"
        place = here[0]
        found.append(place)
    return found


def marks(node: str) -> Iterator[str]:
    """`skip` and `xfail` wherever they reach this test: on it, in its parameters, on its class or module."""
    path = node.partition("::")[0]
    assigned = {
        target.id: one.value
        for one in module(path).body
        if isinstance(one, ast.Assign)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    found = definitions(node)
    reach: list[ast.AST] = [found[-1], *(mark for one in found for mark in one.decorator_list)]
    reach += [one for outer in found[:-1] for one in outer.body if isinstance(one, ast.Assign)]
    reach += [assigned[name] for name in ("pytestmark",) if name in assigned]
    for part in reach:
        for inner in ast.walk(part):
            for one in ast.walk(assigned[inner.id]) if getattr(inner, "id", None) in assigned else (inner,):
                if isinstance(one, ast.Attribute) and one.attr in ("skip", "xfail"):
                    yield one.attr


def test_the_page_and_this_table_hold_the_same_promises() -> None:
    found = promises_of((ROOT / "docs/guarantees.md").read_text())
    assert len(set(found)) == len(found)
    assert set(found) == set(PROMISES)
    assert found == list(PROMISES), "the same promises, in another order"


def test_the_readme_leads_to_the_promises() -> None:
    assert "(docs/guarantees.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("promise", PROMISES)
def test_every_promise_has_tests_that_run(promise: str) -> None:
    assert PROMISES[promise]
    for node in PROMISES[promise]:
        assert definitions(node)
        assert not list(marks(node)), f"marked skip or xfail: {node}"
    assert len(set(PROMISES[promise])) == len(PROMISES[promise])


@pytest.mark.parametrize(
    "node",
    [
        "tests/test_promises.py::test_that_never_was",
        "tests/test_gone.py::test_version",
        "tests/test_promises.py",
        "tests/test_promises.py::promises_of",
    ],
)
def test_a_test_that_is_not_there_is_noticed(node: str) -> None:
    with pytest.raises(AssertionError):
        definitions(node)


def test_marks_are_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_marked.py").write_text(
        """
import pytest
long = pytest.mark.long
later = pytest.mark.xfail(strict=True)
CASES = [1, pytest.param(2, marks=pytest.mark.skip)]

class TestPlain:
    @long
    @pytest.mark.skipif(True, reason="a machine may lack something")
    def test_good(self): pass

    @later
    def test_named(self): pass

    @pytest.mark.parametrize("case", CASES)
    def test_one_case(self, case): pass

@pytest.mark.xfail
class TestMarked:
    def test_inside(self): pass
"""
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = "tests/test_marked.py"
    assert not list(marks(f"{path}::TestPlain::test_good"))
    for name in (
        "TestPlain::test_named",
        "TestPlain::test_one_case",
        "TestMarked::test_inside",
        "TestMarked",
    ):
        assert list(marks(f"{path}::{name}")), name
