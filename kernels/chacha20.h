// The keystream of ChaCha20 (RFC 8439), vectorized with one lane per block.
#pragma once

#include "vectors.h"

constexpr int kBlockWords = 8;  // 64-bit words per block

struct Stream {
  uint32_t key[8];
  uint32_t nonce[3];  // two words of the step, and the parameter's number
};

// One 32-bit word of each block.
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
constexpr int kBlocks = kVectorBytes / 4;

template <int bits>
inline Words rotated(Words x) {
  return (x << bits) | (x >> (32 - bits));
}

inline void quarter(Words& a, Words& b, Words& c, Words& d) {
  a += b, d = rotated<16>(d ^ a);
  c += d, b = rotated<12>(b ^ c);
  a += b, d = rotated<8>(d ^ a);
  c += d, b = rotated<7>(b ^ c);
}

// Writes kBlocks * kBlockWords words from `block` on, read as little-endian numbers.
inline void keystream(const Stream& stream, uint32_t block, int64_t* words) {
  const uint32_t constants[4] = {0x61707865, 0x3320646E, 0x79622D32, 0x6B206574};
  Words first[16], x[16];
  for (int i = 0; i < 4; ++i) first[i] = Words{} + constants[i];
  for (int i = 0; i < 8; ++i) first[4 + i] = Words{} + stream.key[i];
  uint32_t blocks[kBlocks];
  for (int i = 0; i < kBlocks; ++i) blocks[i] = block + uint32_t(i);
  std::memcpy(&first[12], blocks, sizeof blocks);
  for (int i = 0; i < 3; ++i) first[13 + i] = Words{} + stream.nonce[i];
  for (int i = 0; i < 16; ++i) x[i] = first[i];
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 4; ++i) quarter(x[i], x[4 + i], x[8 + i], x[12 + i]);
    for (int i = 0; i < 4; ++i) {
      quarter(x[i], x[4 + (i + 1) % 4], x[8 + (i + 2) % 4], x[12 + (i + 3) % 4]);
    }
  }
  uint32_t rows[16][kBlocks];
  for (int i = 0; i < 16; ++i) {
    x[i] += first[i];
    std::memcpy(rows[i], &x[i], sizeof x[i]);
  }
  for (int block = 0; block < kBlocks; ++block) {
    for (int i = 0; i < kBlockWords; ++i) {
      uint64_t high = rows[2 * i + 1][block];
      words[block * kBlockWords + i] = int64_t(high << 32 | rows[2 * i][block]);
    }
  }
}
