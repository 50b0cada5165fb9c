"""What can be wrong with a wheel. Each refusal is a class of its own with a stable slug."""

from __future__ import annotations

from kernel_depot.errors import DepotError


class WheelError(DepotError):
    """The root of every refusal of the wheels room; a wheel that cannot be used as it is."""

    slug = "wheel-invalid"
    title = "The wheel cannot be used"
    status = 422


class WheelDigestMismatch(WheelError):
    """The file's bytes are not those that were pinned."""

    slug = "wheel-digest-mismatch"
    title = "The wheel's SHA-256 is not the pinned one"


class WheelFilenameInvalid(WheelError):
    """A file name that PEP 427 does not allow."""

    slug = "wheel-filename-invalid"
    title = "Not a wheel file name"


class WheelArchContradiction(WheelError):
    """The filename's platform tag names another CPU than the one asked for."""

    slug = "wheel-arch-contradiction"
    title = "The wheel is for another CPU architecture"


class ArchiveTruncated(WheelError):
    """The archive ends before its own records say it does."""

    slug = "archive-truncated"
    title = "The archive is cut short"


class ArchiveMalformed(WheelError):
    """A record of the archive has a signature, count or field that no writer makes."""

    slug = "archive-malformed"
    title = "The archive's records are broken"


class Zip64Contradiction(WheelError):
    """Zip64 fields are absent where needed, or disagree with the classic ones or with the file."""

    slug = "archive-zip64-contradiction"
    title = "The archive's Zip64 fields lie"


class DataBeforeFirstMember(WheelError):
    """Bytes lie before the first member's record."""

    slug = "archive-data-before-first-member"
    title = "Data before the archive's first record"


class DataAfterLastRecord(WheelError):
    """Bytes, or an archive comment, lie after the end record."""

    slug = "archive-data-after-last-record"
    title = "Data after the archive's last record"


class DataBetweenMembers(WheelError):
    """Bytes lie between two records that no record accounts for."""

    slug = "archive-data-between-members"
    title = "Unaccounted data between the archive's records"


class MembersOverlap(WheelError):
    """Two members claim the same bytes."""

    slug = "archive-members-overlap"
    title = "Members of the archive overlap"


class LocalHeaderMismatch(WheelError):
    """A member's local header or data descriptor says something else than the central directory."""

    slug = "archive-local-header-mismatch"
    title = "A local header disagrees with the central directory"


class TooManyMembers(WheelError):
    """More members, or a larger directory, than the limit allows."""

    slug = "archive-too-many-members"
    title = "The archive has too many members"


class UnpackedTooLarge(WheelError):
    """One member, or all together, unpack to more bytes than the limit allows."""

    slug = "archive-unpacked-too-large"
    title = "The archive unpacks to too many bytes"


class RatioTooHigh(WheelError):
    """A member, or the whole archive, is packed tighter than honest content is."""

    slug = "archive-ratio-too-high"
    title = "The archive's compression ratio is suspicious"


class MemberPathAbsolute(WheelError):
    """A member's path starts at the file system's root."""

    slug = "member-path-absolute"
    title = "A member's path is absolute"


class MemberPathTraversal(WheelError):
    """A member's path climbs out with `..`."""

    slug = "member-path-traversal"
    title = "A member's path leaves its directory"


class MemberPathNotNormal(WheelError):
    """A member's path is empty or has an empty or `.` segment."""

    slug = "member-path-not-normal"
    title = "A member's path is not in its normal form"


class MemberPathTooLong(WheelError):
    """A member's path, or one segment of it, is longer than a file system takes."""

    slug = "member-path-too-long"
    title = "A member's path is too long"


class MemberPathBackslash(WheelError):
    """A member's path has a backslash."""

    slug = "member-path-backslash"
    title = "A member's path has a backslash"


class MemberPathDriveLetter(WheelError):
    """A member's path has a drive letter."""

    slug = "member-path-drive-letter"
    title = "A member's path has a drive letter"


class MemberPathNul(WheelError):
    """A member's path has a NUL."""

    slug = "member-path-nul"
    title = "A member's path has a NUL character"


class MemberPathControlCharacter(WheelError):
    """A member's path has a control or an invisible formatting character."""

    slug = "member-path-control-character"
    title = "A member's path has a control character"


class MemberPathNotText(WheelError):
    """A member's path is not UTF-8, or not marked as such, or named a second time in an extra field."""

    slug = "member-path-not-text"
    title = "A member's path has no certain spelling"


class MemberSymlink(WheelError):
    """A member is a symbolic link."""

    slug = "member-symlink"
    title = "A member is a symbolic link"


class MemberSpecialMode(WheelError):
    """A member is a device, a pipe or a socket, is setuid, or is a directory in disguise."""

    slug = "member-special-mode"
    title = "A member has a special mode"


class MemberNameDuplicate(WheelError):
    """Two members have the same name."""

    slug = "member-name-duplicate"
    title = "Two members have the same name"


class MemberNameCaseCollision(WheelError):
    """Two members' names differ only in case."""

    slug = "member-name-case-collision"
    title = "Two members' names differ only in case"


class MemberNameUnicodeCollision(WheelError):
    """Two members' names are the same text in another Unicode spelling."""

    slug = "member-name-unicode-collision"
    title = "Two members' names differ only in Unicode spelling"


class MemberFileAndDirectory(WheelError):
    """One name is both a file and the directory of another member."""

    slug = "member-file-and-directory"
    title = "A member is both file and directory"


class MemberEncrypted(WheelError):
    """A member is encrypted."""

    slug = "member-encrypted"
    title = "A member is encrypted"


class MemberCompressionUnknown(WheelError):
    """A member is neither stored nor deflated."""

    slug = "member-compression-unknown"
    title = "A member's compression method is unknown"


class MemberLargerThanDeclared(WheelError):
    """A member unpacks to more bytes than it declares."""

    slug = "member-larger-than-declared"
    title = "A member is larger than it declares"


class MemberSmallerThanDeclared(WheelError):
    """A member unpacks to fewer bytes than it declares."""

    slug = "member-smaller-than-declared"
    title = "A member is smaller than it declares"


class MemberDataInvalid(WheelError):
    """A member's deflate stream is broken, or ends before its packed bytes do."""

    slug = "member-data-invalid"
    title = "A member's packed data is broken"


class MemberCrcMismatch(WheelError):
    """A member's CRC-32 is not the one the archive declares."""

    slug = "member-crc-mismatch"
    title = "A member's CRC-32 is wrong"


class RecordMissing(WheelError):
    """The wheel has no dist-info RECORD, or more than one dist-info directory."""

    slug = "record-missing"
    title = "The wheel has no RECORD"


class RecordMalformed(WheelError):
    """RECORD cannot be read as PEP 376 rows."""

    slug = "record-malformed"
    title = "The wheel's RECORD cannot be read"


class RecordDuplicate(WheelError):
    """RECORD has two rows for one file."""

    slug = "record-duplicate"
    title = "The wheel's RECORD names a file twice"


class RecordHashAbsent(WheelError):
    """A row that must carry a hash has none."""

    slug = "record-hash-absent"
    title = "The wheel's RECORD has no hash for a member"


class RecordHashWeak(WheelError):
    """A row's hash algorithm is weaker than SHA-256 or unknown."""

    slug = "record-hash-weak"
    title = "The wheel's RECORD uses a weak or unknown hash"


class RecordHashMismatch(WheelError):
    """A member's bytes are not those RECORD names."""

    slug = "record-hash-mismatch"
    title = "A member's hash is not the one in RECORD"


class RecordSizeMismatch(WheelError):
    """A member's size is not the one RECORD names."""

    slug = "record-size-mismatch"
    title = "A member's size is not the one in RECORD"


class RecordFileAbsent(WheelError):
    """RECORD names a file that the wheel lacks."""

    slug = "record-file-absent"
    title = "RECORD names a file that is not in the wheel"


class RecordMemberUnlisted(WheelError):
    """The wheel has a member that RECORD does not name."""

    slug = "record-member-unlisted"
    title = "A member is not in RECORD"


class RecordDigestMismatch(WheelError):
    """RECORD itself is not the one the pin names."""

    slug = "record-digest-mismatch"
    title = "RECORD's SHA-256 is not the pinned one"


class MetadataMissing(WheelError):
    """The wheel has no METADATA, or METADATA has no single name and version."""

    slug = "metadata-missing"
    title = "The wheel's METADATA is missing or unreadable"


class MetadataContradiction(WheelError):
    """METADATA or the dist-info directory name another project or version than the file name."""

    slug = "metadata-contradiction"
    title = "The wheel's METADATA contradicts its file name"
