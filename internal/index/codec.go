package index

import (
	"encoding/binary"
	"encoding/hex"

	"prefixgate/internal/block"
)

// schemaVersion is part of every key. Raise it whenever what is written under a key, or where chains are cut, changes:
// gateways of both versions then live side by side on one Redis, each with its own entries.
const schemaVersion = "1"

// The fields of a run's hash besides those of its holders, which are their 8-byte keys.
const (
	fieldPath   = "p" // run.path
	fieldNested = "n" // offsets, 2 bytes each
	stepBytes   = 10  // of a holder's field: blocks 2, check 2, time 6
)

// keyOf returns the Redis key of the run that starts at block h, such as "pg1:00f3a99e0c2b7d41".
func (x *Redis) keyOf(h block.Hash) string {
	var raw [8]byte
	binary.BigEndian.PutUint64(raw[:], uint64(h))
	buf := make([]byte, 0, len(x.prefix)+16)
	buf = append(buf, x.prefix...)
	return string(hex.AppendEncode(buf, raw[:]))
}

func encodeNested(offsets []uint16) string {
	b := make([]byte, 0, 2*len(offsets))
	for _, o := range offsets {
		b = binary.LittleEndian.AppendUint16(b, o)
	}
	return string(b)
}

func encodeHolder(holder uint64) string {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], holder)
	return string(b[:])
}

// encodeSteps returns the field of a holder, "" if it has no claim.
func encodeSteps(claims []claim, holder uint64) string {
	var b []byte
	for _, c := range claims {
		if c.holder != holder {
			continue
		}
		b = binary.LittleEndian.AppendUint16(b, c.blocks)
		b = binary.LittleEndian.AppendUint16(b, c.check)
		b = append(b, byte(c.at), byte(c.at>>8), byte(c.at>>16), byte(c.at>>24), byte(c.at>>32), byte(c.at>>40))
	}
	return string(b)
}

// decodeRun reads a run from the fields of its hash; nil if there is none. What does not look like ours is passed
// over: anybody may write under our keys.
func decodeRun(fields map[string]string) *run {
	if len(fields) == 0 {
		return nil
	}
	r := &run{claims: make([]claim, 0, len(fields))}
	// Holding on to the string Redis' answer came in saves a copy, most of what a lookup of a long prompt would allocate.
	if p := fields[fieldPath]; len(p) < 4*longestSegment {
		r.path = p[:len(p)/4*4]
	}
	for k, v := range fields {
		switch {
		case k == fieldNested:
			for i := 0; i+2 <= len(v) && len(r.nested) < maxNested; i += 2 {
				r.nested = append(r.nested, uint16(v[i])|uint16(v[i+1])<<8)
			}
		case len(k) == 8 && len(v)%stepBytes == 0 && len(v) <= stepBytes*(maxSteps+1):
			holder := binary.LittleEndian.Uint64([]byte(k))
			for ; len(v) > 0; v = v[stepBytes:] {
				r.claims = append(r.claims, claim{
					holder: holder,
					blocks: uint16(v[0]) | uint16(v[1])<<8,
					check:  uint16(v[2]) | uint16(v[3])<<8,
					at: int64(v[4]) | int64(v[5])<<8 | int64(v[6])<<16 | int64(v[7])<<24 |
						int64(v[8])<<32 | int64(v[9])<<40,
				})
			}
		}
	}
	return r
}
